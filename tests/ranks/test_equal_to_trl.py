"""``muster train`` gives the losses of TRL's SFTTrainer and of the transformers Trainer, step by step."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from made_up_worlds import made_up_world
from muster_command import Muster
from patience import GIVE_UP_S
from ranks.conftest import Torchrun
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.text import TextFormat, open_files, rows_of
from torchmuster.train.data.tokenizers import TransformersTokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.nightly, pytest.mark.integrations]

SCRIPT = Path(__file__).parent / "library_scripts" / "sft_reference.py"
STEPS, BATCH, LENGTH = 50, 4, 96
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(count: int) -> str:
    return " ".join(random.choice(tiny_models.LINES).split()[0] for _ in range(count))


def record(kind: str) -> dict[str, Any]:
    question, answer = words(random.randint(1, 12)), words(random.randint(1, 40))
    if kind == "prompt_completion":
        return {"prompt": f"{question}: ", "completion": answer}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    if random.random() < 0.3:
        messages += [
            {"role": "user", "content": words(3)},
            {"role": "assistant", "content": words(5)},
        ]
    return {"messages": messages}


def write_rows(path: Path, model: Path, text: Path) -> None:
    """Write the rows that muster train makes of a text, in the order in which it uses them."""
    format_ = TextFormat(
        tokenizer=TransformersTokenizer(str(model)), sequence_length=LENGTH, pack=False
    )
    loader = loader_for(
        rows_of(open_files(str(text), format_.record), format_),
        made_up_world(),
        global_batch_size=BATCH,
        shuffle=False,
    )
    lines = []
    for epoch in range(9):
        for step in loader.epoch(epoch):
            for micro in step:
                for ids, labels, mask in zip(
                    *(micro.batch[one] for one in ("input_ids", "labels", "attention_mask")),
                    strict=True,
                ):
                    one = {"input_ids": ids, "labels": labels, "attention_mask": mask}
                    lines.append(
                        json.dumps({name: tensor.tolist() for name, tensor in one.items()})
                    )
    path.write_text("\n".join(lines[: STEPS * BATCH]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "prompt_completion", "text"])
def test_fifty_steps_have_the_same_losses(
    kind: str, ranks: int, muster: Muster, torchrun: Torchrun, tmp_path: Path
) -> None:
    random.seed(7)
    model = tiny_models.make_model(tmp_path / "model", "byte-level", max_position_embeddings=256)
    (model / "chat_template.jinja").write_text(MARKED)
    data, reference = tmp_path / "data.jsonl", tmp_path / "reference.jsonl"
    if kind == "text":
        lines = [json.dumps({"text": words(random.randint(1, 60))}) for _ in range(STEPS * BATCH)]
        data.write_text("\n".join(lines))
        write_rows(reference, model, data)
    else:
        data.write_text("\n".join(json.dumps(record(kind)) for _ in range(STEPS * BATCH)))
        reference = data
    theirs = torchrun(
        str(SCRIPT),
        *(str(model), str(reference), str(tmp_path / "result"), str(BATCH // ranks), str(LENGTH)),
        ranks=ranks,
        within_s=3 * GIVE_UP_S,
    )
    assert theirs.code == 0, theirs.err + theirs.out
    expected = json.loads((tmp_path / "result").read_text())
    settings = {
        "model.model_name_or_path": str(model),
        "data.files": str(data),
        "data.sequence_length": LENGTH,
        "data.pack": "false",
        "data.shuffle": "false",
        "train.steps": STEPS,
        "train.global_batch_size": BATCH,
        "train.micro_batch_size": BATCH // ranks,
        "train.learning_rate": 1e-3,
        "train.weight_decay": 0,
        "train.clip_norm": 1,
        "train.log_every": 1,
        "checkpoint.every": "never",
    }
    flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = muster(
        *("train", "--device", "cpu", "--ranks", str(ranks)), *flags, timeout_s=3 * GIVE_UP_S
    )
    assert done.code == 0, done.err + done.out
    (run,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(one) for one in (run / "metrics" / "steps.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in steps]
    assert len(losses) == len(expected) == STEPS
    assert losses[-1] < losses[0] - 0.5  # it learns
    apart = max(abs(mine / other - 1) for mine, other in zip(losses, expected, strict=True))
    print(f"{kind}, {ranks} ranks: losses {losses[0]:.4f} to {losses[-1]:.4f}, apart {apart:.1e}")
    assert apart < 2e-5
