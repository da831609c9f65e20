"""Sets the current micro-batch of layers: each micro-batch in flight has graphs of its own."""

import torch

from .layers import decoder_layers, language_model_of, mtp_layers, vision_model_of


def set_current_microbatch(model: torch.nn.Module, microbatch_id: int) -> None:
    """Set ``current_microbatch`` of every layer that may replay graphs; schedules call this before a forward pass.

    These are the layers of the language model's decoder, of multi-token prediction, and of the vision model's decoder.

    Args:
        model: One model chunk, in its wrappers; it may lack any of these.
        microbatch_id: The micro-batch of the step, counted from 0.
    """
    language = language_model_of(model)
    for layer in decoder_layers(language) + mtp_layers(language) + decoder_layers(vision_model_of(model)):
        layer.__dict__["current_microbatch"] = microbatch_id  # bypasses Module.__setattr__, which is slow
