"""Train megatron-core's ``HybridModel`` with attention, MLP, MoE and Mamba layers in the order of a pattern."""

from dataclasses import replace

import torch

from tests.support.trainings.case import VOCABULARY, Case
from tests.support.trainings.training import Training


class HybridTraining(Training):
    """Training of a hybrid model with the layers of ``case.pattern``."""

    def __init__(self, case: Case, graphs: bool):
        main, *depths = case.pattern.split("/")
        super().__init__(replace(case, layers=len(main.replace("|", "")), mtp=len(depths)), graphs)

    def _unwrapped_chunk(self, virtual_stage: int | None) -> torch.nn.Module:
        from megatron.core import parallel_state
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from tests.support.layers import hybrid_spec
        from tests.support.layers.packed_attention import with_packed_attention

        case = self.case
        spec = hybrid_spec.transformer_engine if case.transformer_engine else hybrid_spec.local
        if case.packed and not case.transformer_engine:
            layers = replace(spec.submodules, attention_layer=with_packed_attention(spec.submodules.attention_layer))
            spec = replace(spec, submodules=layers)
        stage = {"ignore_virtual": False, "vp_stage": virtual_stage}
        return HybridModel(
            self.config,
            spec,
            VOCABULARY,
            case.sequence,
            hybrid_layer_pattern=case.pattern,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type=case.positions,
            vp_stage=virtual_stage,
        )
