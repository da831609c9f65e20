"""Run ``examples/pretrain_gpt.py`` with user code.

The environment variable USER_CODE lists functions of this module, separated by spaces. Each function patches the
example. TensorBoard's writer is the stand-in of ``pretrain_with_writers``.
"""

import hashlib
import os
import signal
import sys
import time

import torch

from megatron.core import parallel_state
from megatron.training import get_args, training
from megatron.training.global_vars import get_signal_handler
from tests.support.layers.adapters import add_adapters
from tests.support.pretraining import pretrain_with_writers
from tests.support.pretraining.pretrain import SCRIPT

sys.path.insert(0, str(SCRIPT.parent))
import pretrain_gpt  # isort: skip


def averaged_weights():
    """Maintain an exponential moving average of the weights; each rank logs a hash of the average after each step."""
    train_step = training.train_step
    averages: dict[str, torch.Tensor] = {}

    def train_and_average(forward_step, data, model, *args, **kwargs):
        result = train_step(forward_step, data, model, *args, **kwargs)
        for chunk in model:
            chunk.stop_communication()  # the chunk then contains the optimizer's parameters
            for name, param in chunk.named_parameters():
                weights = param.to_local().detach().float()
                averages.setdefault(name, weights.clone()).lerp_(weights, 0.1)
        bits = b"".join(average.numpy(force=True).tobytes() for average in averages.values())
        value = int(hashlib.sha256(bits).hexdigest()[:12], 16)  # exactly representable as a float
        pretrain_with_writers.note(f"rank {os.environ['RANK']}", "averages", value, kwargs["iteration"])
        return result

    training.train_step = train_and_average


def unused_parameters():
    """Add an unused parameter to the model and to each of the first two layers.

    The double buffer has no room for more.
    """

    def add(chunks):
        for chunk in chunks:
            for module in (chunk, *chunk.decoder.layers[:2]):
                module.unused = torch.nn.Parameter(torch.ones(16))
        return chunks

    _change_model(add)


def shared_layers():
    """Replace the third layer by the first one."""

    def share(chunks):
        for chunk in chunks:
            chunk.decoder.layers[2] = chunk.decoder.layers[0]
        return chunks

    _change_model(share)


def adapters():
    """Add low-rank adapters and freeze all other parameters."""

    def adapt(chunks):
        for chunk in chunks:
            add_adapters(chunk, rank=4)
        return chunks

    _change_model(adapt)


def _change_model(change):
    config_from_args = pretrain_gpt.gpt_config_from_args

    def changed_config(args):
        config = config_from_args(args)
        config.pre_wrap_hooks.append(change)
        return config

    pretrain_gpt.gpt_config_from_args = changed_config


def masked_losses():
    """Mask every third token, by zeroing its loss in place, and every third micro-batch. Log the largest loss."""
    loss_func, calls = pretrain_gpt.loss_func, 0

    def masked(mask, output):
        nonlocal calls
        calls += 1
        left_out = torch.arange(mask.numel(), device=mask.device).view_as(mask) % 3 == 0
        output.masked_fill_(left_out, 0.0)
        loss, tokens, logged = loss_func(mask * ~left_out * (calls % 3 > 0), output)
        return loss, tokens, logged | {"largest loss": output.detach().max().float()}

    pretrain_gpt.loss_func = masked


def mean_losses():
    """Make the loss function return two values, the mean loss and the log, instead of three."""

    def mean(mask, output):
        loss = (output.float() * mask).sum() / mask.sum()
        return loss, {"lm loss": loss.detach().clone()}

    pretrain_gpt.loss_func = mean


def weighted_by_a_first_pass():
    """Call the model twice: the first call, without gradients, yields weights for the losses of the second."""
    forward_step = pretrain_gpt.forward_step

    def twice(data, model):
        was_training = model.training
        model.eval()
        with torch.no_grad():
            weights = forward_step(data, model)[0].sigmoid()
        model.train(was_training)
        output, loss_func = forward_step(data, model)
        return output, lambda losses: loss_func(losses * weights)

    pretrain_gpt.forward_step = twice


def own_batches():
    """Generate batches of random tokens (``--dataloader-type external``)."""

    def batches(seed):
        args, generator = get_args(), torch.Generator()
        generator.manual_seed(seed + parallel_state.get_data_parallel_rank())
        length, rows = args.seq_length, args.micro_batch_size
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        while True:
            tokens = torch.randint(args.vocab_size, (rows, length + 1), generator=generator)
            yield {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": torch.ones(rows, length),
                "position_ids": torch.arange(length).repeat(rows, 1),
                "attention_mask": mask.repeat(rows, 1, 1, 1),
            }

    def build_datasets(num_samples, vp_stage=None):
        return tuple(map(batches, (0, 100, 200)))

    build_datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain_gpt.build_datasets = build_datasets


def terminated_in_capture():
    """Send SIGTERM to the last rank while it captures its first graph."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def begin_and_terminate(graph, *args, **kwargs):
        begin(graph, *args, **kwargs)
        torch.cuda.CUDAGraph.capture_begin = begin
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    torch.cuda.CUDAGraph.capture_begin = begin_and_terminate


def terminated_launcher():
    """Send SIGTERM to the launcher in the fifth step, and wait until it sends SIGTERM to the ranks."""
    train_step, steps = training.train_step, 0

    def train_and_terminate(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 5:
            if os.environ["RANK"] == "0":
                os.kill(os.getppid(), signal.SIGTERM)
            while not get_signal_handler()._signal_received:
                time.sleep(0.01)
        return train_step(*args, **kwargs)

    training.train_step = train_and_terminate


def main():
    pretrain_with_writers.install()
    for name in os.environ["USER_CODE"].split():
        globals()[name]()
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
