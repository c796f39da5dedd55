// What can be taken along: a picture, a drawing, a clip, a link, a program.
import { paint } from "explorer/canvas.js";
import { byId, element } from "explorer/elements.js";
import { python } from "explorer/python.js";
import { encode } from "explorer/link.js";
import { startFrom } from "explorer/state.js";
import { summary } from "explorer/summary.js";
import { svg } from "explorer/vector.js";

const SHARPNESS = 2; // pixels of the PNG for one of the page
const [RUN, REST] = [6000, 600]; // milliseconds of a clip, and for which it stands still at either end
const CLIPS = ["video/webm;codecs=vp9", "video/webm;codecs=vp8", "video/webm"];

/** Listens to the buttons. */
export const mountExports = (store, context) => {
  const { data, say, colours } = context;
  let recorder = null;
  let address = "";

  const download = (blob, ending) => {
    if (!blob) return say("This browser could not make the file: the picture may be too large for it.");
    URL.revokeObjectURL(address);
    address = URL.createObjectURL(blob);
    const name = `normkit-${store.get().scene}.${ending}`;
    element("a", { href: address, download: name }).click();
    say(`${name} is on its way to your downloads.`);
  };

  // To the clipboard or, where that is closed, into a field.
  const copy = async (text, what) => {
    byId("copy")?.remove();
    try {
      await navigator.clipboard.writeText(text);
      say(`${what} is in the clipboard.`);
    } catch {
      const field = element("textarea", { id: "copy", readOnly: true, value: text, rows: 4, ariaLabel: what });
      byId("link").closest("div").after(field);
      field.focus();
      field.select();
      say(`The clipboard is closed to this page. ${what} stands below the buttons, selected: copy it from there.`);
    }
  };

  const sheet = (ratio = 1) => {
    const { width, height } = context.size();
    return element("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  };

  const picture = () => {
    const canvas = sheet(SHARPNESS);
    paint(canvas.getContext("2d"), context.commands(), colours, { ratio: SHARPNESS });
    canvas.toBlob((blob) => download(blob, "png"));
  };

  const drawing = () => {
    const text = svg(context.commands(), context.size(), colours, {
      title: data.title,
      description: summary(store.get(), context.computed()),
    });
    download(new Blob([text], { type: "image/svg+xml" }), "svg");
  };

  // One run of the timeline; pressed again, it ends early.
  const clip = () => {
    if (recorder) return recorder.state === "recording" && recorder.stop();
    const type = typeof MediaRecorder === "function" && CLIPS.find((each) => MediaRecorder.isTypeSupported(each));
    const canvas = sheet();
    if (!type || !canvas.captureStream) {
      return say("This browser cannot record a drawing: take a PNG, or run `normkit explore --animation clip.gif`.");
    }
    const { stage } = store.get();
    const parts = [];
    let begun = 0;
    const tick = (now) => {
      if (!recorder) return;
      canvas.getContext("2d").drawImage(context.canvas, 0, 0, canvas.width, canvas.height);
      begun ||= now;
      if (now - begun > RUN) return recorder.stop();
      if (recorder.state === "inactive") recorder.start();
      store.set({ stage: 4 * Math.min(1, Math.max(0, (now - begun - REST) / (RUN - 2 * REST))) });
      requestAnimationFrame(tick);
    };
    store.set({ stage: 0 });
    recorder = new MediaRecorder(canvas.captureStream(30), { mimeType: type, videoBitsPerSecond: 4e6 });
    recorder.ondataavailable = ({ data: part }) => parts.push(part);
    recorder.onstop = () => {
      recorder = null;
      store.set({ stage });
      download(new Blob(parts, { type: "video/webm" }), "webm");
    };
    say(`Recording one run of the timeline: ${RUN / 1000} seconds. Press again to end it sooner.`);
    requestAnimationFrame(tick);
  };

  const link = () => {
    const hash = encode(store.get(), startFrom(data.start ?? {}));
    // A page inside another has no address of its own.
    return copy(/^(https?|file):/.test(location.href) ? location.href.split("#")[0] + hash : hash, "The link");
  };

  const program = () => copy(python(store.get(), context.computed()), "The program");
  const actions = { png: picture, svg: drawing, webm: clip, link, python: program };
  for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
};
