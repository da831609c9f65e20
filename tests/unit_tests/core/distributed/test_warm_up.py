"""Number of warm-up passes before a whole model is captured."""

import pytest

from megatron.core.transformer._cuda_graphs.agreement import CaptureAgreement
from megatron.core.transformer._cuda_graphs.engine import captured
from tests.support.trainings.training import Training

from .captured_training import graphed

pytestmark = pytest.mark.usefixtures("side_stream")


@pytest.fixture
def warm_ups(one_rank, monkeypatch):
    """Return a function that trains some steps, captures the whole model and counts its warm-up passes."""
    made = []

    def count(steps):
        ran: list[object] = []
        workspaces: list[int] = []
        monkeypatch.setattr(captured, "make_workspaces", lambda: workspaces.append(len(ran)))
        run = captured.GraphedCallable.forward

        def noted(passes, capture):
            ran.append(capture)
            run(passes, capture)

        monkeypatch.setattr(captured.GraphedCallable, "forward", noted)
        training = Training(graphed("model"), graphs=True)
        training.make_helper()
        made.append(training.helper)
        for _ in range(steps):
            training.step()
        training.capture(lambda training: training.helper.create_cudagraphs())
        training.step()
        assert training.step_replays[-1] > 0
        of_warm_up = ran.count(None)
        assert workspaces == ([] if of_warm_up else [0])  # created explicitly if no warm-up pass creates them
        return of_warm_up, len(ran)

    yield count
    for helper in made:
        helper.delete_cuda_graphs()


@pytest.mark.parametrize(("steps", "runs"), [(1, 1), (2, 1), (3, 0), (4, 0)])
def test_no_warm_up_after_three_training_steps(warm_ups, steps, runs):
    assert warm_ups(steps) == (runs, runs + 1)


def test_warm_up_runs_if_another_rank_needs_it(warm_ups, monkeypatch):
    monkeypatch.setattr(CaptureAgreement, "objections", lambda self, own: own | {"COLD": "not on rank 1"})
    assert warm_ups(3) == (1, 2)
