"""Every command suggests the name that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.apar_command import run


@pytest.mark.parametrize(
    ("command", "suggested"),
    [
        ("serve apar-tniy", "did you mean apar-tiny?"),
        ("serve --parallel-format threadweavr", "did you mean threadweaver?"),
        ("doctor --model apar-tniy", "did you mean apar-tiny?"),
        ("doctor --parallel-format lits", "did you mean lists?"),
        ("generate Hi --model apar-tniy", "did you mean apar-tiny?"),
        ("generate Hi --decoder medsua", "did you mean medusa?"),
        ("train --model apar-tniy --data . --out OUT", "did you mean apar-tiny?"),
        ("train --model m --data . --out OUT --recipe apar-lra", "did you mean apar-lora?"),
        ("train --model m --data . --out OUT --recipe FILE", "did you mean batch_size?"),
        ("train --model m --data . --out OUT --recipe FILE", "lora.ranks: "),
        ("train --model m --data . --out OUT --recipe FILE", "did you mean rank?"),
        ("data generate --model apar-tniy --out OUT", "did you mean apar-tiny?"),
        ("fetch smolm2-135m", "did you mean smollm2-135m?"),
        ("evaluate speed --decoders medsua --out OUT", "did you mean medusa?"),
        ("evaluate speed --prompts vicuna-bnch --out OUT", "did you mean vicuna-bench?"),
        ("evaluate acceptance --model apar-tniy --out OUT", "did you mean apar-tiny?"),
        ("experiment fig5", "Did you mean 'fig5b', 'fig5a'?"),
        ("experiment fig5a --trace t --methods eagr --out OUT", "did you mean eager?"),
        ("experiment fig5a --trace t --gpu h1000 --out OUT", "did you mean h100?"),
        ("plan --rate 1 --gpu a100-90gb", "did you mean a100-80gb?"),
        ("plan --rate 1 --model lama-7b", "did you mean llama-7b?"),
        ("plan --rate 1 --forks mixd", "did you mean mixed?"),
        ("simulate --trace FILE --router thread --out OUT", "did you mean threads?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_right_one(
    tmp_path: Path, command: str, suggested: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{batch_sizes: 8, batch_size: 8, num_steps: 1, learning_rate: 1, lora: {ranks: 8}}"
    )
    replaced = {"FILE": recipe, "OUT": tmp_path / "out"}

    code, output = run(*(replaced.get(word, word) for word in command.split()))

    assert code != 0
    assert suggested in output.replace("│", "")
    assert not (tmp_path / "out" / "checkpoints").exists()
