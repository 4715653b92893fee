"""Mistakes of a user, each of which mypy finds: it would call the comment unused otherwise."""

from __future__ import annotations

import xray


def train(sums: xray.Handle, sft: xray.Handle) -> None:
    with xray.workspace("runs/own", sead=0):  # type: ignore[call-arg]
        xray.sft(sft, data=sums, stepz=30)  # type: ignore[call-arg]
        xray.sft(sft, promts=sums)  # type: ignore[call-arg]
        xray.ppo(sft, prompts=sums, method="grpoo")  # type: ignore[arg-type]
        xray.ppo(sft, prompts=sums, kl={"coeff": 0.01})  # type: ignore[typeddict-unknown-key]
        xray.reward(verifier={"kind": "maths", "column": "answer"})  # type: ignore[arg-type, misc]
