"""A training whose learning rate is 30 times the recipe's, watched: four questions answered, and what to change first.

The architecture is the demo GPT-2, freshly initialised; it is trained on the bytes of the demo text. RATE_FACTOR = 1
makes a healthy run of it. A page with all measurements is written to a folder that is printed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import normkit as nk
from normkit import demo
from normkit.demo.architecture import build

RATE_FACTOR = 30
STEPS, BATCH, WINDOW, WARMUP = 24, 2, 64, 10

torch.set_num_threads(1)
torch.manual_seed(0)
model = build("layernorm").train()
rate = 2e-3 * RATE_FACTOR
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
text = torch.tensor(list(demo.text().encode()))

folder = Path(tempfile.mkdtemp(prefix="normkit-watch-"))
with nk.watch(model, optimizer, every=4, out=folder, name=f"demo GPT-2, learning rate x {RATE_FACTOR}") as watch:
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - WINDOW, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + WINDOW + 1] for start in starts])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        watch.step(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()

training = watch.inspection().training
print(f"page: {folder / 'report.html'}\n")
for answer in training.answers:
    print(f"{answer.question}\n  {answer.verdict}: {answer.detail}")
print("\nto change first:", *(training.first_change or ["nothing"]), sep="\n  ")
