"""Widgets for notebooks. Each has a form without a browser: a figure, or a text."""

from labkit.errors import UserError


def roofline_explorer(device=None, gemm_csv=None):
    """A matrix multiply on the roofline, with sliders and menus for its sizes, dtype and device.

    `device` is a DeviceSpec, a name in the device table, or None for the one in use. `gemm_csv` is
    the table that the experiment gemm writes; None looks for results/gemm.csv here and one folder
    up. Returns an ipywidget. `roofline_static` is the same picture as a figure.
    """
    _need_ipywidgets()
    from labkit.widgets.roofline import RooflineExplorer

    return RooflineExplorer(device, gemm_csv)


def roofline_static(M=16, k=2048, n=2048, device=None, compare=None, dtype=None, gemm_csv=None):
    """The explorer's picture as a Figure: [M, k] @ [k, n] on the roofline of one or two devices.

    Arguments as in `roofline_explorer`; `compare` is a second device. Needs no ipywidgets.
    """
    from labkit.widgets import picture

    return picture.static(M, k, n, device, compare, dtype, gemm_csv)


def memory_explorer(device=None):
    """What a training step needs in memory, by sliders and menus, and which GPUs have as much.

    `device` is a DeviceSpec, a name in the device table, or None for the one in use; it stands
    among the GPUs. Returns an ipywidget. `memory_static` is the same picture as a figure.
    """
    _need_ipywidgets()
    from labkit.widgets.memory import MemoryExplorer

    return MemoryExplorer(device)


def memory_static(
    model="olmoe-1b-7b", layers=4, micro_batch_size=4, seqlen=2048, recompute=False,
    state="bfloat16", device=None,
):  # fmt: skip
    """The memory explorer's picture as a Figure; see `labkit.memory_model.step_bytes`.

    `model` is a preset of ModelConfig, `state` the dtypes of the training state: "bfloat16",
    "float32", "bfloat16, float32 moments", "bfloat16, float32 moments and master weights".
    Needs no ipywidgets.
    """
    from labkit.devices import resolve
    from labkit.widgets import memory_picture

    device = None if device is None else resolve(device)
    return memory_picture.figure(model, layers, micro_batch_size, seqlen, recompute, state, device)


def step_explorer(device=None, sweep_csv=None):
    """Predicted time and memory of a training step, by sliders, beside what was measured.

    What `labkit.perfmodel` predicts, in its terms if it returns Predictions. `device` is a
    DeviceSpec, a name in the device table, or None for the one in use. `sweep_csv` is the table of
    `labkit sweep`; None looks for results/sweep.csv here and one folder up. The steps that ship
    with labkit are there as well. Returns an ipywidget. `step_static` is its picture as a figure.
    """
    _need_ipywidgets()
    from labkit.widgets.predictor import StepExplorer

    return StepExplorer(device, sweep_csv)


def step_static(
    model="olmoe-1b-7b", layers=4, micro_batch_size=4, seqlen=2048, micro_batches=1,
    recompute=False, device=None, sweep_csv=None,
):  # fmt: skip
    """The step explorer's picture as a Figure: a step's predicted time and memory, measured marks.

    `model` is a preset of ModelConfig; the other arguments as in `step_explorer`. Needs no
    ipywidgets. UserError: an unknown model or device, a size below 1, and an unreadable sweep.
    """
    from labkit.widgets import predictor_picture

    return predictor_picture.static(
        model, layers, micro_batch_size, seqlen, micro_batches, recompute, device, sweep_csv
    )


def quiz(question: str, options, answer: str, why: str):
    """A question with radio buttons and a Check button; `why` shows once an answer is checked.

    `options` are two or more different strings, `answer` is the right one. In `question` and
    `why`, backticks mark code. Returns an ipywidget; UserError for arguments that make no quiz.
    """
    _need_ipywidgets()
    from labkit.widgets.question import Quiz

    return Quiz(question, options, answer, why)


def _need_ipywidgets() -> None:
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        raise UserError(
            "widgets need ipywidgets, which is not installed; "
            "python -m pip install 'labkit[notebook]' brings it"
        ) from None
