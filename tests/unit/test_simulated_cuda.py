"""The simulated GPU behaves as CUDA does where the checks rely on it."""

import time
from time import perf_counter

import pytest
import torch

from tests.public.simulated_cuda import SimulatedCuda


@pytest.fixture
def cuda():
    simulated = SimulatedCuda()
    with simulated.installed():
        yield simulated


def pair():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def test_a_launch_returns_before_its_kernel_ends(cuda):
    began = time.perf_counter()
    cuda.launch(50.0)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    waited = time.perf_counter()
    assert launched - began < 0.001, f"the launch took {launched - began:.4f} s"
    assert waited - began >= 0.050, f"synchronize returned after {waited - began:.4f} s of 0.05"


def test_events_see_the_gpus_time_and_not_the_hosts(cuda):
    start, end = pair()
    cuda.launch(10.0)
    start.record()
    cuda.launch(2.0)
    end.record()
    cuda.run_python(100.0)
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == pytest.approx(2.0)


def test_an_idle_gpu_waits_for_the_host_between_two_events(cuda):
    start, end = pair()
    start.record()
    cuda.run_python(7.0)
    cuda.launch(2.0)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == pytest.approx(9.0, abs=0.1)


def test_elapsed_time_refuses_what_cuda_refuses(cuda):
    start, end = pair()
    start.record()
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    cuda.launch(5.0)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    end.synchronize()
    start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_query_turns_true_when_the_gpu_gets_there(cuda):
    _, end = pair()
    cuda.launch(5.0)
    end.record()
    assert not end.query() and not torch.cuda.current_stream().query()
    time.sleep(0.006)
    assert end.query() and torch.cuda.current_stream().query()


def test_without_a_gpu_events_raise():
    with SimulatedCuda(available=False).installed():
        assert not torch.cuda.is_available()
        for use in (torch.cuda.Event, torch.cuda.synchronize):
            with pytest.raises(RuntimeError, match="driver"):
                use()


def reads_an_imported_clock():
    return perf_counter()


def test_imported_names_are_replaced_and_put_back():
    real = (perf_counter, torch.cuda.Event, torch.cuda.is_available())
    simulated = SimulatedCuda()
    with simulated.installed(reads_an_imported_clock):
        simulated.run_python(1e9)
        assert reads_an_imported_clock() > 1e6, "the function still reads the real clock"
    assert (perf_counter, torch.cuda.Event, torch.cuda.is_available()) == real
