"""Test capture mode, failed captures, and the cleanup after a capture."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest

from megatron.core.transformer import cuda_graphs as te_helper
from megatron.core.transformer._cuda_graphs.errors import CallOrderError, CaptureFailedError
from megatron.core.transformer.cuda_graphs import is_graph_capturing

from .stages import Alone, Failure, helper_of


def state(capturing_helper):
    return {
        "capturing": is_graph_capturing(),
        "graphs": capturing_helper.graphs_created(),
        "finished": capturing_helper.capture_finished(),
        "resets": capturing_helper.model[0].resets,
    }


def fail():
    raise Failure


@pytest.mark.usefixtures("one_stage")
class TestCaptureMode:
    def test_capture_mode_is_on_during_capture_only(self):
        during = []
        capturing = helper_of(lambda: during.append(is_graph_capturing()))
        capturing.create_cudagraphs()
        assert during == [True]
        assert state(capturing) == {"capturing": False, "graphs": True, "finished": True, "resets": 1}

    def test_capture_mode_is_off_after_a_failed_capture(self):
        capturing = helper_of(fail)
        with pytest.raises(CaptureFailedError, match="Failure"):
            capturing.create_cudagraphs()
        assert state(capturing) == {"capturing": False, "graphs": False, "finished": False, "resets": 1}

    def test_capture_mode_is_off_if_ranks_cannot_agree(self, monkeypatch):
        def no_store(groups, **which):
            raise Failure

        monkeypatch.setattr(te_helper, "CaptureAgreement", no_store)
        capturing = helper_of()
        with pytest.raises(Failure):
            capturing.create_cudagraphs()
        assert not is_graph_capturing()

    def test_eager_fallback_warns_and_can_capture_again(self, caplog):
        attempts = iter([fail])
        capturing = helper_of(lambda: next(attempts, lambda: None)())
        capturing.config.cuda_graph_fallback = "eager"
        capturing.create_cudagraphs()
        assert state(capturing) == {"capturing": False, "graphs": False, "finished": True, "resets": 1}
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "without these CUDA graphs (--cuda-graph-fallback eager)" in record.getMessage()
        assert record.exc_info[0] is Failure
        capturing.create_cudagraphs()
        assert capturing.graphs_created()

    @pytest.mark.parametrize("fallback", ["error", "eager"])
    def test_ctrl_c_ends_the_program(self, fallback):
        def interrupt():
            raise KeyboardInterrupt

        capturing = helper_of(interrupt)
        capturing.config.cuda_graph_fallback = fallback
        with pytest.raises(KeyboardInterrupt):
            capturing.create_cudagraphs()
        assert state(capturing) == {"capturing": False, "graphs": False, "finished": False, "resets": 1}

    def test_early_ctrl_c_reaches_other_ranks(self, monkeypatch):
        told = []

        class Told(Alone):
            def _failed(self, error):
                told.append(type(error))

        def interrupt(*message):
            raise KeyboardInterrupt

        monkeypatch.setattr(te_helper, "log_single_rank", interrupt)
        capturing = helper_of()
        monkeypatch.setattr(te_helper, "CaptureAgreement", lambda groups, **which: Told())
        with pytest.raises(KeyboardInterrupt):
            capturing.create_cudagraphs()
        assert told == [KeyboardInterrupt]
        assert state(capturing) == {"capturing": False, "graphs": False, "finished": False, "resets": 1}

    @pytest.mark.parametrize("frozen", [True, False])
    @pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
    def test_garbage_is_frozen_during_capture(self, monkeypatch, frozen, fails):
        calls: list[str] = []
        monkeypatch.setattr(te_helper, "FREEZE_GC", frozen)
        for name in ("freeze", "unfreeze"):
            monkeypatch.setattr(gc, name, partial(calls.append, name))

        def capture():
            calls.append("capture")
            if fails:
                raise Failure

        with pytest.raises(CaptureFailedError) if fails else nullcontext():
            helper_of(capture).create_cudagraphs()
        assert calls == (["freeze", "capture", "unfreeze"] if frozen else ["capture"])

    def test_capture_without_layers_finishes(self, caplog):
        capturing = helper_of(layers=0)
        capturing.create_cudagraphs()
        assert state(capturing) == {"capturing": False, "graphs": False, "finished": True, "resets": 1}
        assert "no graphable layers found" in caplog.text

    def test_second_capture_is_refused(self):
        capturing = helper_of()
        capturing.create_cudagraphs()
        with pytest.raises(CallOrderError, match="captured already: call delete_cuda_graphs"):
            capturing.create_cudagraphs()
        assert not is_graph_capturing()

    def test_deleting_missing_graphs_is_refused(self):
        with pytest.raises(CallOrderError, match="there are no CUDA graphs to delete"):
            helper_of().delete_cuda_graphs()
