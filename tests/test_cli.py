"""The command line: what users see, exit codes, and a run that survives whatever ends it."""

import gzip
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet.cli import COMMANDS, main
from gpunet.cuda_kernels.sim import toolchain
from gpunet.data import load_digits
from gpunet.errors import DeviceError
from gpunet.serialization import save
from tests.mpi_jobs import LIMIT, ROOT

ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
TRAIN = [sys.executable, "-m", "gpunet", "train", "mlp"]


def invoke(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with an MLP that was trained for two epochs, and what was printed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, invoke("train", "mlp", "--epochs", 2, "--out", folder).stdout


@pytest.mark.parametrize("optimizer", ["adam", "lars"])
def test_shared_optimizer_state_and_threads_change_no_number(tmp_path, optimizer):
    common = ("train", "mlp", "--epochs", 1, "--batch-size", 200, "--optimizer", optimizer, "--clip-norm", 1)
    invoke(*common, "--out", tmp_path / "plain", "--prefetch", 0)
    invoke(*common, "--out", tmp_path / "shared", "--prefetch", 3, "--shard-optimizer")
    plain, shared = (
        np.loadtxt(tmp_path / name / "steps.csv", delimiter=",", skiprows=1, usecols=2)
        for name in ("plain", "shared")
    )
    assert plain[-1] < plain[0]
    np.testing.assert_allclose(shared, plain, atol=1e-5)
    (part,) = (tmp_path / "shared" / "checkpoints").glob("*.part")
    assert ".rank-0-of-1." in part.name
    # What is shared fits a run that shares nothing.
    invoke("train", "mlp", "--resume", "--epochs", 1, "--out", tmp_path / "shared")
    refused = invoke(
        *common, "--out", tmp_path / "x", "--shard-optimizer", "--compression", "float16", code=1
    )
    assert "shared optimizer state (--shard-optimizer), wanted --compression none" in refused.output


def test_momentum_belongs_to_the_optimizer_or_to_the_compression(tmp_path):
    """Where gradients of micro-batches are gathered, one process compresses them too."""
    parts = ("train", "mlp", "--epochs", 1, "--out", tmp_path, "--micro-batches", 2, "--compression")
    refused = invoke(*parts, "topk", code=1).output
    wanted = "momentum 0.9 and the optimizer 0.9, wanted one of them to be 0: --momentum 0, or --compression"
    assert f"{wanted} topk:0.01:0" in " ".join(refused.split())
    for options in (("topk", "--momentum", 0, "--overwrite"), ("topk:0.01:0", "--overwrite")):
        assert "kept back" in invoke(*parts, *options).stdout


def test_training_prints_and_writes_all(run):
    folder, shown = run
    assert "digits: 1,501 images of 1x8x8 to train on, 296 held out; device cpu" in shown
    assert "epoch 1/2  loss" in shown
    assert "epoch 2/2  loss" in shown
    assert "samples/s" in shown
    assert "of 296" in shown
    assert "\x1b" not in shown
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "curve.png",
        "init_net.pb",
        "init_net.pbtxt",
        "predict_net.pb",
        "predict_net.pbtxt",
        "steps.csv",
        "value_info.json",
    ]
    assert len(list((folder / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compression", "nope"], "there is no compression 'nope', wanted one of none,"),
        (["--compression", "powersgd:0"], "powersgd: rank is 0, wanted at least 1"),
        (["--bucket-mib", "nan"], "buckets of nan MiB, wanted more than 0"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_process_too(options, message, tmp_path):
    assert message in invoke("train", "mlp", "--epochs", 1, "--out", tmp_path, *options, code=1).output


def test_the_curve_is_optional(tmp_path, monkeypatch):
    monkeypatch.setattr("gpunet.training.curve.can_draw", lambda: False)
    shown = invoke("train", "mlp", "--epochs", 1, "--out", tmp_path).stdout
    assert "for a picture of the course of training: pip install 'gpunet[plot]'" in shown
    assert not (tmp_path / "curve.png").exists()


def test_training_in_float16_saves_a_model_that_predicts(tmp_path):
    invoke("train", "mlp", "--epochs", 1, "--precision", "float16", "--out", tmp_path)
    images, labels = load_digits("test")
    np.save(tmp_path / "many.npy", images[:20])
    lines = invoke("predict", tmp_path, tmp_path / "many.npy", "--top", 1).stdout.splitlines()
    found = [int(line.split("class ")[1].split()[0]) for line in lines]
    assert np.mean(found == labels[:20]) > 0.7
    assert "FloatToHalf" in (tmp_path / "predict_net.pbtxt").read_text()


def test_predict(run, tmp_path):
    images, labels = load_digits("test")
    np.save(tmp_path / "many.npy", images[:20])
    np.save(tmp_path / "one.npy", images[0, 0])
    lines = invoke(
        "predict", run[0], tmp_path / "many.npy", tmp_path / "one.npy", "--top", 2
    ).stdout.splitlines()
    assert len(lines) == 21
    found = [int(line.split("class ")[1].split()[0]) for line in lines]
    assert np.mean(found[:20] == labels[:20]) > 0.7
    assert lines[0].split(": ")[0] == f"{tmp_path / 'many.npy'}[0]"
    assert lines[0].split(": ")[1] == lines[20].split(": ")[1]
    assert lines[20].count("class") == 2


def test_predict_prints_scores_that_are_no_shares_as_numbers(tmp_path):
    net = gpunet.proto.NetDef(name="sums", external_input=["x"], external_output=["y"])
    net.op.append(gpunet.make_operator("ReduceBackSum", ["x"], ["y"], num_reduce_dim=2))
    save(tmp_path / "predict_net.pb", net)
    save(tmp_path / "init_net.pb", gpunet.proto.NetDef(name="init"))
    np.save(tmp_path / "images.npy", np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2))
    shown = invoke("predict", tmp_path, tmp_path / "images.npy", "--device", "cpu").stdout
    assert shown.endswith("images.npy: class 1 22  class 0 6\n")


def test_predict_scales_pictures(run, tmp_path):
    from PIL import Image

    image = (load_digits("test")[0][0, 0] * 255).astype(np.uint8)
    Image.fromarray(image).resize((64, 64), Image.Resampling.NEAREST).convert("RGB").save(tmp_path / "x.png")
    assert invoke("predict", run[0], tmp_path / "x.png").stdout.count("class") == 3


def test_info(run):
    shown = invoke("info", run[0]).stdout
    for text in ("FC", "Relu", "Softmax", "float32 1x256", "data (float32 1x1x8x8)", "softmax"):
        assert text in shown
    count = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert f"parameters:       {count:,} in 6 blobs" in shown
    assert f"({4 * count:,} bytes)" in shown
    assert f"({4 * (count + 256 + 128):,} bytes)" in shown  # peak: both hidden layers
    assert "float32 7x256" in invoke("info", run[0], "--batch-size", 7).stdout
    assert "float32 2x256" in invoke("info", run[0], "--input", "data=2x1x8x8").stdout


def test_info_without_parameters(run, tmp_path):
    net = tmp_path / "net.pbtxt"
    net.write_bytes((run[0] / "predict_net.pbtxt").read_bytes())
    shown = invoke("info", net).stdout
    assert "parameters:       not known: the file's name does not tell where its init net is, --init" in shown
    assert "peak memory:      not known" in shown
    given = ["--init-net", run[0] / "init_net.pb", "--input", "data=1x1x8x8"]
    assert invoke("info", net, *given).stdout == invoke("info", run[0]).stdout
    net = net.rename(tmp_path / "my_predict_net.pbtxt")
    assert "there is no init net beside the predict net" in invoke("info", net).stdout


def test_devices(monkeypatch):
    def refuse(device):
        raise DeviceError(f"no {device} here, get one")

    monkeypatch.setattr("gpunet.backends.backend", refuse)
    lines = invoke("devices").stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["cpu", "cuda:0"]
    assert "available: " in lines[0]
    assert lines[1].endswith("not available: no cuda:0 here, get one")
    assert "sim:0    not available: no sim:0 here, get one" in lines
    assert lines[-1].startswith("MPI")


def test_devices_tell_of_every_library(monkeypatch):
    def missing(*arguments):
        raise DeviceError("it is not there, get one")

    lines = {line.split()[0]: line for line in invoke("devices").stdout.splitlines()}
    names = ["NVRTC", "cuDNN", "cuBLASLt", "NCCL", "C++"]
    assert all(
        lines[name].split(maxsplit=1)[1].startswith(("available: ", "not available: ")) for name in names
    )
    found = toolchain.find()
    if found is not None:
        assert lines["C++"] == f"C++      available: {' '.join(found.command)}"
    monkeypatch.setattr("gpunet.cuda_kernels.nvrtc.bindings", missing)
    monkeypatch.setattr("gpunet.cuda_kernels.cudnn.versions", missing)
    monkeypatch.setattr("gpunet.cuda_kernels.cublaslt.bindings", missing)
    monkeypatch.setattr("gpunet.distributed.nccl.load_nccl", missing)
    monkeypatch.setattr("gpunet.cuda_kernels.sim.toolchain.find", lambda: None)
    lines = {line.split()[0]: line for line in invoke("devices").stdout.splitlines()}
    for name in names[:-1]:
        assert lines[name] == f"{name:8} not available: it is not there, get one"
    assert lines["C++"].endswith("wanted g++, clang++, or pip install ziglang")


def test_ops():
    listed = invoke("ops").stdout.splitlines()
    assert [line.split()[0] for line in listed] == gpunet.operator_types()
    shown = invoke("ops", "Conv").stdout
    for text in (
        "Inputs:",
        "Outputs:",
        "Arguments:",
        "order (str, default 'NCHW', one of 'NCHW', 'NHWC')",
        "Gradient: yes",
    ):
        assert text in shown
    assert "output 0 of input 0" in invoke("ops", "Relu").stdout
    assert "Random" in invoke("ops", "GaussianFill").stdout


def test_every_operator_can_be_described():
    for name in gpunet.operator_types():
        assert invoke("ops", name).stdout.startswith(name)


def test_version_and_help():
    assert gpunet.__version__ in invoke("--version").stdout
    shown = invoke("--help").stdout
    for name, text in COMMANDS.items():
        assert name in shown
        assert text in shown
        command = invoke(name, "--help").stdout
        assert "Usage:" in command
        assert "--debug" in command


def test_examples_in_help_keep_their_lines():
    shown = invoke("launch", "--help").stdout
    assert "\n  gpunet launch -n 4 -- gpunet train resnet20\n" in shown
    assert not any("\\b" in invoke(name, "--help").stdout for name in COMMANDS)


def test_help_imports_no_command():
    code = (
        "import sys, gpunet.cli; gpunet.cli.main(['--help'], standalone_mode=False); "
        "print([m for m in ('rich', 'gpunet.training', 'gpunet.zoo', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "lenett"],
            "there is no model 'lenett', wanted one of lenet, mlp, resnet20; did you mean lenet?",
        ),
        (["train", "mlp", "--data", "nowhere"], "no data set 'nowhere'"),
        (["train", "mlp", "--device", "gpu", "--out", "{tmp}/new"], "unknown device 'gpu'"),
        (["train", "mlp", "--device", "cpu:1", "--out", "{tmp}/new"], "the host is one device, wanted 'cpu'"),
        (
            ["train", "mlp", "--batch-size", "5000", "--out", "{tmp}/new"],
            "batch size 5000, wanted at most the 1501",
        ),
        (["train", "mlp", "--learning-rate", "1e30", "--out", "{tmp}/new"], "with learning rate "),
        (["train", "mlp", "--out", "{tmp}/file/new"], "is a file, wanted a folder"),
        (
            ["predict", "{tmp}/none", "x.npy"],
            "there is no such model, wanted a folder or a predict net: {tmp}/none",
        ),
        (["predict", "{run}", "{tmp}/none.npy"], "{tmp}/none.npy"),
        (["predict", "{run}", "{tmp}/wrong.npy"], "images of shape (1, 9, 9), the model wants (1, 8, 8)"),
        (["info", "{tmp}/file"], "not a NetDef"),
        (["ops", "Convv"], "unknown operator type 'Convv'; did you mean Conv"),
    ],
)
def test_errors_are_one_line(run, tmp_path, arguments, message):
    (tmp_path / "file").write_bytes(b"\xff" * 10)
    np.save(tmp_path / "wrong.npy", np.zeros((9, 9)))
    places = {"tmp": tmp_path, "run": run[0]}
    result = invoke(*(a.format(**places) for a in arguments), code=1)
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message.format(**places) in lines[0]


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_the_traceback(place):
    arguments = ["ops", "Convv"]
    arguments.insert(place, "--debug")
    result = invoke(*arguments, code=1)
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'MODEL'"),
        (["train", "mlp", "--epochs", "0"], "0 is not in the range"),
        (["train", "mlp", "--resume", "--overwrite"], "exclude each other"),
        (["trai", "mlp"], "No such command 'trai'. Did you mean 'train'?"),
        (["xyz"], "No such command 'xyz'.\n"),
        (["info", "{run}", "--input", "data=1xa"], "wanted NAME=SHAPE"),
        (["info", "{run}", "--input", "x=1"], "no input 'x', wanted one of data"),
    ],
)
def test_wrong_usage(run, arguments, message):
    result = invoke(*(a.format(run=run[0]) for a in arguments), code=2)
    assert message in result.stderr


def write_idx(folder, compressed):
    images, labels = load_digits("train")
    images = (images[:60, 0] * 255).astype(np.uint8)
    for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels[:60].astype(np.uint8))):
        data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
        if compressed:
            (folder / f"t10k-{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / f"t10k-{name}").write_bytes(data)


@pytest.mark.parametrize("compressed", [False, True])
def test_training_on_idx_files(tmp_path, compressed):
    write_idx(tmp_path, compressed)
    shown = invoke(
        "train", "mlp", "--data", tmp_path, "--epochs", 1, "--batch-size", 9, "--out", tmp_path / "run"
    ).stdout
    assert "54 images of 1x8x8 to train on, 6 held out" in shown
    # The data are remembered.
    assert (
        "going on after step 6 of 6" in invoke("train", "mlp", "--out", tmp_path / "run", "--resume").stdout
    )


# ---- stopping and going on


def results(folder):
    return [(folder / name).read_bytes() for name in ("init_net.pb", "predict_net.pb", "steps.csv")]


OPTIONS = ["--epochs", "12", "--seed", "7", "--checkpoint-every", "7"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run([*TRAIN, *OPTIONS, "--out", folder], env=ENVIRONMENT, check=True, capture_output=True)
    return results(folder)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)],
    ids=lambda x: str(int(x)),
)
def test_a_run_that_was_ended_goes_on_to_the_same_weights(tmp_path, undisturbed, number, code):
    command = [*TRAIN, *OPTIONS, "--out", tmp_path]
    # Behind step 23, the second since a checkpoint, it waits for what is done to it.
    paused = [sys.executable, "-m", "tests.distributed_workers.paused", "0", "step", "23", *command[3:]]
    env = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        paused, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        late = threading.Timer(LIMIT, process.kill)
        late.start()
        assert any("waits, pid" in line for line in process.stdout), process.stderr.read()
        process.send_signal(number)
        out, err = process.communicate()
        late.cancel()
    assert process.returncode == code, (out, err)
    assert len((tmp_path / "steps.csv").read_bytes().splitlines()) in (23, 24)
    assert not (tmp_path / "init_net.pb").exists()
    if number != signal.SIGKILL:
        assert err.startswith("interrupted after step ")
        assert len(err.splitlines()) == 1
    # Without being told what to do with it, an unfinished run is not thrown away.
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "--resume goes on with it" in refused.stderr
    # The settings need not be given again.
    resume = [*TRAIN, "--out", tmp_path, "--resume"]
    resumed = subprocess.run(resume, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "going on after step " in resumed.stdout
    assert results(tmp_path) == undisturbed


def test_resuming_with_another_setting_names_it(run):
    result = invoke("train", "mlp", "--out", run[0], "--resume", "--learning-rate", 0.3, "--seed", 1, code=1)
    assert "learning-rate is 0.1 there, 0.3 here; seed is 0 there, 1 here" in result.stderr
    result = invoke("train", "lenet", "--out", run[0], "--resume", code=1)
    assert "model is 'mlp' there, 'lenet' here" in result.stderr


def test_resuming_a_finished_run_changes_nothing(run):
    before = results(run[0])
    assert "going on after step 47 of 47" in invoke("train", "mlp", "--out", run[0], "--resume").stdout
    assert results(run[0]) == before


def test_resuming_where_nothing_is_starts(tmp_path):
    shown = invoke("train", "mlp", "--out", tmp_path / "new", "--resume", "--epochs", 1).stdout
    assert "no checkpoint in" in shown
    assert "epoch 1/1" in shown


def test_damaged_checkpoints(tmp_path):
    invoke("train", "mlp", "--epochs", 2, "--out", tmp_path)
    newest, older = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    finished = results(tmp_path)
    newest.write_bytes(newest.read_bytes()[:1000])
    command = [*TRAIN, "--resume", "--out", tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("warning: checkpoint ")
    assert "is cut off" in done.stderr
    assert f"going on from the older {older.name}" in done.stderr
    assert results(tmp_path) == finished
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(b"damaged")
    result = invoke("train", "mlp", "--out", tmp_path, "--epochs", 2, code=1)
    assert "no checkpoint in" in result.stderr
    assert "--overwrite starts over" in result.stderr
    invoke("train", "mlp", "--out", tmp_path, "--epochs", 2, "--overwrite")
    assert results(tmp_path) == finished


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_first_command_learns_digits(tmp_path, seed):
    shown = invoke("train", "lenet", "--out", tmp_path, "--seed", seed).stdout
    last = next(line for line in shown.splitlines() if line.startswith("epoch 10/10"))
    assert float(last.split("accuracy ")[2].split("%")[0]) >= 98
