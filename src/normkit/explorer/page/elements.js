/** Elements of the page, found, made and changed. Text stays text: nothing here reads markup. */

export const byId = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));

/** Writes the properties that differ. */
export function put(node, properties) {
  for (const [key, value] of Object.entries(properties)) if (node[key] !== value) node[key] = value;
  return node;
}

/** A new element; "math:mi" is one of MathML.
 * @param {Record<string, any>} properties @param {...(Node | string)} children @returns {any} */
export function element(name, properties = {}, ...children) {
  const [tag, space] = name.split(":").reverse();
  const node = space
    ? document.createElementNS("http://www.w3.org/1998/Math/MathML", tag)
    : document.createElement(tag);
  node.append(...children);
  return put(node, properties);
}

/** Makes the children of an element those given, where only names of elements and text differ: a part that is the same
 * stays, and is not laid out again. */
export function refill(node, children) {
  const old = [...node.children];
  if (old.length !== children.length || old.some(({ nodeName }, k) => nodeName !== children[k].nodeName))
    return node.replaceChildren(...children);
  children.forEach((child, k) => {
    if (child.childElementCount) refill(old[k], [...child.children]);
    else put(old[k], { textContent: child.textContent });
  });
}
