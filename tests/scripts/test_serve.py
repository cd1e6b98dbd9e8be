"""The example server: its answers are timm's, and what is no picture is refused."""

import json
import math
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from lipsformer.engine.run_files import CheckpointError
from scripts import serve
from scripts._runtimes import trace, write
from tests.data.photos import encoded
from tests.scripts.test_demo import CLASSES, SIZE, network, photo, write_network

PICTURE = encoded(photo(), "PNG")


@pytest.fixture(params=["fp32", "bf16"])
def precision(request):
    return request.param


@contextmanager
def running(classifier):
    """The address of a server, host and port."""
    with serve.make_server(classifier, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield "127.0.0.1", server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=["folded", pytest.param("openvino", marks=pytest.mark.slow)])
def address(request, precision, tmp_path):
    """A server that runs what the folder holds."""
    model = write_network(tmp_path)
    if request.param == "openvino":
        pytest.importorskip("openvino")
        write("openvino", lambda: trace(model, torch.zeros(2, 3, SIZE, SIZE)), tmp_path)
    with running(serve.load_classifier(tmp_path, precision=precision)) as place:
        yield "http://{}:{}".format(*place)


def test_a_visitor_learns_how_and_a_silent_one_holds_up_nobody(tmp_path):
    write_network(tmp_path)
    with running(serve.load_classifier(tmp_path)) as place:
        with socket.create_connection(place):  # sends nothing for longer than the others wait
            url = "http://{}:{}".format(*place)
            with urllib.request.urlopen(url, timeout=serve.WAIT_S / 2) as response:
                assert response.read().decode() == f"curl --data-binary @picture.jpg {url}\n"
            with urllib.request.urlopen(url, PICTURE, timeout=serve.WAIT_S / 2) as response:
                assert len(json.loads(response.read())) == serve.BEST
        for length, code in (
            (b"", b" 411 "),
            (b"Content-Length: %s\r\n" % (5000 * b"9"), b" 413 "),
        ):
            with socket.create_connection(place) as client:
                client.sendall(b"POST / HTTP/1.0\r\n" + length + b"\r\n")
                assert code in client.recv(100)


def test_weights_that_are_not_finite_are_refused_at_the_start(tmp_path):
    weights = write_network(tmp_path).state_dict()
    weights["head.fc.bias"][0] = math.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds NaN or infinite numbers"):
        serve.load_classifier(tmp_path)


def test_pictures_are_decoded_one_at_a_time_and_clients_that_leave_are_forgotten(tmp_path, capfd):
    write_network(tmp_path)
    classifier = serve.load_classifier(tmp_path)
    prepare, now, most = classifier.prepare, [], []

    def slowly(picture):
        now.append(picture)
        most.append(len(now))
        time.sleep(0.1)
        now.pop()
        return prepare(picture)

    classifier.prepare = slowly
    with running(classifier) as place:
        url = "http://{}:{}".format(*place)
        with socket.create_connection(place) as client:
            client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 9\r\n\r\nabc")
            time.sleep(0.1)
            # closing sends a reset now
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda _: urllib.request.urlopen(url, PICTURE), range(4))
            assert [answer.status for answer in answers] == [200] * 4
    assert most == [1] * 4
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_answers_are_timms_and_what_is_no_picture_is_refused(address, precision):
    for wrong, code in ((b"no picture", 400), (PICTURE[:99], 400), (b"", 413)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address, data=wrong)
        assert refused.value.code == code
        refused.value.close()
    with urllib.request.urlopen(address, data=PICTURE) as response:
        answer = json.loads(response.read())
    model = network()
    transform = create_transform(**resolve_model_data_config(model))
    expected = model(transform(photo())[None]).softmax(-1)[0]
    tolerance = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    for name, share in answer.items():
        assert share == pytest.approx(expected[CLASSES.index(name)].item(), rel=tolerance)
    assert min(answer.values()) >= (1 - tolerance) * expected.topk(5).values.min().item()
    if precision == "bf16":  # not float32 under another name
        assert list(answer.values()) != pytest.approx(expected.topk(5).values.tolist(), rel=1e-6)
