"""The usual losses: equal to torch's and transformers' own, counted over tokens."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torchmuster.train import losses

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers")]


class Embedded(nn.Module):
    """A language model of one layer that looks at nothing but its own token."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(input_ids))
        return logits


@pytest.fixture
def model() -> Embedded:
    torch.manual_seed(0)
    return Embedded()


def test_padding_is_not_learnt_where_labels_are_left_out(model: Embedded) -> None:
    ids = torch.tensor([[1, 2, 3, 0], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    _, count = losses.language_model(model, {"input_ids": ids, "attention_mask": mask})
    assert count == 3
    _, count = losses.language_model(model, {"input_ids": ids})
    assert count == 6


def test_a_batch_without_any_label_gives_zero_and_no_nan(model: Embedded) -> None:
    ids = torch.tensor([[1, 2, 3]])
    total, count = losses.language_model(
        model, {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    )
    torch.autograd.backward(total)
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(torch.all(one.grad == 0) for one in model.parameters() if one.grad is not None)


def test_it_equals_the_loss_that_transformers_computes() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    ids = torch.randint(0, 32, (3, 7))
    labels = ids.masked_fill(torch.rand(3, 7) < 0.3, -100)
    total, count = losses.language_model(model, {"input_ids": ids, "labels": labels})
    theirs = model(input_ids=ids, labels=labels).loss
    assert torch.allclose(total / count, theirs, atol=1e-6)


def test_many_logits_are_computed_in_parts_with_the_same_result(
    model: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(0, 11, (4, 9))
    results = []
    for elements in (2**24, 5 * 11):
        monkeypatch.setattr(losses, "_WHOLE_ELEMENTS", elements)
        model.zero_grad()
        total, count = losses.language_model(model, {"input_ids": ids})
        torch.autograd.backward(total)
        assert model.head.weight.grad is not None
        results.append((total.item(), int(count), model.head.weight.grad.clone()))
    (whole, counted, gradient), (parts, counted_in_parts, gradient_of_parts) = results
    assert parts == pytest.approx(whole, rel=1e-6)
    assert counted_in_parts == counted == 32
    assert torch.allclose(gradient, gradient_of_parts, atol=1e-6)


def test_masked_tokens_are_predicted_at_their_own_places(model: Embedded) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[1, 3] = 7, 2
    total, count = losses.classification(model, {"input_ids": ids, "labels": labels})
    logits = model(ids)
    each = [
        F.cross_entropy(logits[0, 1], labels[0, 1]),
        F.cross_entropy(logits[1, 3], labels[1, 3]),
    ]
    assert count == 2
    assert torch.allclose(total, torch.stack(each).sum())


def test_classification_takes_dictionaries_and_is_the_loss_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    batch = {"input_ids": torch.randint(20, (4, 6)), "labels": torch.tensor([0, 2, 1, 2])}
    total, count = losses.classification(model, batch)
    assert torch.allclose(total / count, model(**batch).loss)
