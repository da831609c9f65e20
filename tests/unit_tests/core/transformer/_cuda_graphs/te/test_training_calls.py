"""training_calls: whether training calls a model as graphs of all of it can be replayed."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.te.training_calls import HiddenStatesReads, TrainingCalls


class Model(torch.nn.Module):
    def forward(self, input_ids, position_ids, attention_mask, labels=None, *, packed_seq_params=None, loss_mask=None):
        return input_ids


TOKENS = torch.zeros(2, 4, dtype=torch.int64)
MASK = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
FITTING = (TOKENS, TOKENS, None, TOKENS)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def calls(model):
    return TrainingCalls(model)


def test_calls_with_labels_fit(model, calls):
    model(*FITTING, loss_mask=TOKENS)
    model(TOKENS, position_ids=TOKENS, attention_mask=MASK, labels=TOKENS, packed_seq_params=None)
    assert calls.against() == ""


def test_without_a_call_nothing_is_known(calls):
    assert calls.against() == "it has not been called for training so far"


def test_evaluation_is_no_training(model, calls):
    with torch.no_grad():
        model(*FITTING)
    model.eval()
    model(*FITTING)
    assert calls.against() == "it has not been called for training so far"


@pytest.mark.parametrize("unfit_is_first", [True, False])
@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (FITTING[:3], {}, "it was called without labels"),
        (FITTING, {"packed_seq_params": object()}, "it was called with packed_seq_params"),
        ((TOKENS, None, None, TOKENS), {}, "its position_ids are not of shape [2, 4] and torch.int64"),
        ((TOKENS, TOKENS[:1], None, TOKENS), {}, "its position_ids are not of shape [2, 4] and torch.int64"),
        ((TOKENS, TOKENS, None, TOKENS.int()), {}, "its labels are not of shape [2, 4] and torch.int64"),
        ((TOKENS, TOKENS, MASK[:1], TOKENS), {}, "its attention_mask are not of shape [2, 1, 4, 4] and torch.bool"),
    ],
)
def test_one_call_that_does_not_fit_is_enough(model, calls, args, kwargs, reason, unfit_is_first):
    if not unfit_is_first:
        model(*FITTING)
    model(*args, **kwargs)
    if unfit_is_first:
        model(*FITTING)
    assert calls.against() == reason


def test_the_answer_ends_the_watch(model, calls):
    model(*FITTING)
    assert calls.against() == ""
    assert not model._forward_pre_hooks
    model(*FITTING[:3])
    assert calls.against() == ""


def test_who_is_forgotten_watches_no_longer(model):
    watcher = TrainingCalls(model)
    del watcher
    model(*FITTING[:3])


class Decoder(torch.nn.Module):
    def forward(self, hidden_states, extract_layer_indices=None):
        return hidden_states


@pytest.mark.parametrize(
    ("indices", "training", "grad", "read"),
    [({1}, True, True, True), (set(), True, True, False), ({1}, False, True, False), ({1}, True, False, False)],
)
def test_training_that_asks_for_hidden_states_between_layers_is_noticed(indices, training, grad, read):
    decoders = [Decoder(), Decoder()]
    reads = HiddenStatesReads(decoders)
    decoders[0](TOKENS)
    with torch.set_grad_enabled(grad):
        decoders[1].train(training)(TOKENS, extract_layer_indices=indices)
    decoders[1].train()(TOKENS)
    assert reads.any() == read


def test_arguments_that_another_hook_adds_are_noticed():
    decoder = Decoder()
    reads = HiddenStatesReads([decoder])
    decoder.register_forward_pre_hook(lambda _, args, __: (args, {"extract_layer_indices": {0}}), with_kwargs=True)
    decoder(TOKENS)
    assert reads.any()


def test_once_asked_for_reads_the_watch_is_over():
    decoder = Decoder()
    reads = HiddenStatesReads([decoder])
    assert not reads.any()
    assert not decoder._forward_hooks
    decoder(TOKENS, extract_layer_indices={0})
    assert not reads.any()
