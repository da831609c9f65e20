"""Trains megatron-core's CLIP vision encoder, with a linear classifier, under Megatron-FSDP."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .training import Case, Training

PATCH, CLASSES = 4, 10  # pixels of a side of a patch; classes


class VisionTraining(Training):
    """A vision encoder in place of the GPT. A micro-batch is one image: vision encoders have a batch dimension of 1."""

    def _unwrapped_chunk(self, virtual_stage: int | None) -> torch.nn.Module:
        return classifier(self.config, _side(self.case), self.case.transformer_engine)

    def _batches(self, step: int) -> Iterator[Any]:
        from megatron.core import parallel_state

        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(step)
        count = self.case.microbatches_of(step)
        side = _side(self.case)
        images = torch.randn(ranks, count, 1, 3, side, side, generator=generator)[rank]
        labels = torch.randint(0, CLASSES, (ranks, count, 1), generator=generator)[rank]
        for image, label in zip(images.to(self.case.torch_dtype), labels, strict=True):
            yield SimpleNamespace(images=image.cuda(), labels=label.cuda())

    def _losses(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(batch.images, batch.labels)

    def make_helper(self) -> Any:
        from megatron.core.transformer.cuda_graphs import (
            VisionTECudaGraphHelper,
            get_vision_cuda_graph_seq_length,
        )

        length = get_vision_cuda_graph_seq_length(SimpleNamespace(num_position_embeddings=self._encoder.seq_length))
        self.helper = VisionTECudaGraphHelper(self.chunks, self.config, length, self.case.micro_batch)
        return self.helper

    @property
    def _encoder(self) -> Any:
        from megatron.core.utils import get_attr_wrapped_model

        return get_attr_wrapped_model(self.chunks[0], "vision_model")

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers that are captured."""
        return list(self._encoder.decoder.layers)


def _side(case: Case) -> int:
    """Pixels of a side of the images that have ``case.sequence`` patches, or somewhat fewer: they are square."""
    return PATCH * math.isqrt(case.sequence)


def classifier(config: Any, side: int, transformer_engine: bool = False) -> torch.nn.Module:
    """A model with a ``vision_model``, which returns the loss of each image of ``side`` times ``side`` pixels."""
    from megatron.core.models.vision import vit_layer_specs
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    if transformer_engine:
        spec = vit_layer_specs.get_vit_layer_with_transformer_engine_spec()
    else:
        spec = vit_layer_specs.get_vit_layer_with_local_spec()

    class Classifier(MegatronModule):
        def __init__(self):
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.vision_model = CLIPViTModel(
                config,
                spec,
                patch_dim=PATCH,
                img_h=side,
                img_w=side,
                # With an odd number of tokens TransformerEngine's attention takes another kernel under capture.
                add_class_token=False,
                model_subtype="internvit",  # the others have norms that want Apex or TransformerEngine
            )
            self.head = torch.nn.Linear(config.hidden_size, CLASSES)

        def set_input_tensor(self, input_tensor):
            """Take nothing: there is one pipeline stage."""

        def forward(self, images, labels):
            tokens = self.vision_model(images)
            return torch.nn.functional.cross_entropy(self.head(tokens.mean(1)).float(), labels, reduction="none")

    return Classifier()
