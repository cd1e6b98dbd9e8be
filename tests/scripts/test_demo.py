"""The demo page: what it computes, refuses and leaves behind, and how a browser sees it."""

import base64
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

import lipsformer  # noqa: F401  (registers the models)
from data import UnreadableImageError
from data.images import EncodedPicture
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.config import DataConfig
from lipsformer.engine.build import timm_config
from lipsformer.engine.run_folder import find_weights
from scripts import _demo_answers, demo
from scripts._classifier import MAX_UPLOAD, Classifier
from scripts.reporting.pictures import overlaid
from tests.browser import Browser
from tests.conftest import ROOT
from tests.data.photos import encoded
from tests.data.test_images import REFUSED, manifest

SIZE = 24
CLASSES = ["a <b>bold</b> class", "b", "c", "d", "e", "f", "g"]
DATA = DataConfig(source="folder", img_size=SIZE, crop_pct=0.9, mean=(0.4,) * 3, std=(0.3,) * 3)


def network():
    torch.manual_seed(0)
    model = timm.create_model(
        "lipsformer_swin_nano",
        embed_dim=12,
        depths=(1, 1),
        num_heads=(2, 3),
        num_classes=len(CLASSES),
        pretrained_cfg_overlay={
            "input_size": (3, SIZE, SIZE),
            "crop_pct": DATA.crop_pct,
            "mean": DATA.mean,
            "std": DATA.std,
        },
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write_network(folder):
    """Write the network as a checkpoint; return it."""
    model = network()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(timm_config(model, CLASSES))
    return model


@pytest.fixture(scope="module")
def model():
    return Classifier("lipsformer_swin_nano", network(), CLASSES, DATA)


@pytest.fixture(scope="module")
def answers(model):
    return _demo_answers.Answers(model)


def photo(width=53, height=31):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_prediction_of_a_checkpoint_is_timms(tmp_path):
    expected_model = write_network(tmp_path)
    model = Classifier.from_weights(find_weights(tmp_path))
    assert (model.name, model.classes) == ("lipsformer_swin_nano", CLASSES)
    transform = create_transform(**resolve_model_data_config(expected_model))
    expected = expected_model(transform(photo())[None]).softmax(-1)[0]
    image = model.prepare(EncodedPicture(encoded(photo(), "PNG"), "photo"))
    assert image.shape == (SIZE, SIZE, 3)
    torch.testing.assert_close(model.probabilities(image), expected, rtol=1e-4, atol=1e-6)


def test_noise_is_one_pattern_and_its_effect_is_measured(model):
    image = np.asarray(photo(SIZE, SIZE)) // 4 + 96  # far from where values are clipped
    quiet, loud = model.with_noise(image, 0.05), model.with_noise(image, 0.1)
    step = loud.image.astype(np.float64) - image
    np.testing.assert_allclose(step, 2 * (quiet.image.astype(np.float64) - image), atol=1.5)
    assert abs(step.std() / 255 - 0.1) < 0.01
    assert loud.length == pytest.approx(sum((step / 255).ravel() ** 2) ** 0.5)
    before, after = (
        model.model((torch.tensor(i).permute(2, 0, 1)[None] / 255 - 0.4) / 0.3)[0]
        for i in (image, loud.image)
    )
    assert loud.moved == pytest.approx((after - before).norm().item(), rel=1e-3)
    torch.testing.assert_close(loud.probabilities, after.softmax(-1), rtol=1e-4, atol=1e-6)
    assert np.array_equal(model.with_noise(image, 0.0).image, image)


def test_sensitivity_is_that_of_the_dense_jacobian(model):
    image = np.array(photo(SIZE, SIZE))
    pixels = torch.tensor(image).permute(2, 0, 1).double() / 255
    exact = network().double()
    jacobian = torch.autograd.functional.jacobian(lambda p: exact((p - 0.4)[None] / 0.3)[0], pixels)
    _, values, directions = torch.linalg.svd(jacobian.flatten(1), full_matrices=False)
    found = model.sensitivity(image)
    assert found.constant == pytest.approx(values[0].item(), rel=2e-2)
    assert found.constant <= values[0].item() * (1 + 1e-5)
    worst = directions[0].reshape(pixels.shape).norm(dim=0).numpy()
    assert np.abs(found.direction - worst / worst.max()).max() < 0.2
    assert found.direction.max() == 1.0
    first, second = exact((pixels - 0.4)[None] / 0.3)[0].sort(descending=True).values[:2].tolist()
    assert found.margin == pytest.approx(first - second, rel=1e-3)


def test_a_picture_has_the_certificate_of_its_normalized_image(model, answers):
    image = np.array(photo(SIZE, SIZE))
    pixels = torch.tensor(image).permute(2, 0, 1)[None]
    certified = lipschitz_bound(network(), image_domain((SIZE, SIZE), (0.4,) * 3, (0.3,) * 3))
    logits = network().double()((pixels.double() / 255 - 0.4) / 0.3)
    found = model.certify(image)
    assert found.everywhere == pytest.approx(0.3 * certified_radius(logits, certified).item())
    assert found.around > found.everywhere
    assert found.around < found.attacked
    assert f"no change shorter than {found.everywhere:.2g} changes" in answers.certify(image)


def picture_of(page: str) -> np.ndarray:
    content = base64.b64decode(re.search(r'base64,([^"]+)"', page)[1])
    return np.asarray(Image.open(io.BytesIO(content)))


def test_attention_of_the_chosen_head_lies_over_the_image(answers):
    image = np.array(photo(SIZE, SIZE))
    (block, maps), *_ = answers.model.attention(image).items()
    assert answers.heads == {"stages.0.blocks.0": 2, "stages.1.blocks.0": 3}
    assert answers.block == block and answers.choices(block) == ["mean", "1", "2"]
    for head, received in (("2", maps[1]), ("mean", (maps[0] + maps[1]) / 2)):
        page = answers.attend(image, block, head)
        assert f"{received.min():.2f} <" in page and f"> {received.max():.2f}<" in page
        shares = (received - received.min()) / (received.max() - received.min())
        enlarged = overlaid(image, shares).repeat(6, 0).repeat(6, 1)
        assert np.abs(picture_of(page).astype(int) - enlarged).max() <= 1


def test_overlay_shows_the_image_where_shares_are_low():
    image = np.full((4, 6, 3), (200, 100, 50), np.uint8)
    gray = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    page = overlaid(image, np.array([[0.0, 1.0]]))
    low, high = np.array([13, 8, 135]), np.array([240, 249, 33])  # the ends of plasma
    np.testing.assert_allclose(page[:, :3] - (0.35 * low + 0.65 * gray), 0, atol=1.5)
    np.testing.assert_allclose(page[:, 3:] - (0.8 * high + 0.2 * gray), 0, atol=1.5)


def test_bars_are_sorted_escaped_and_marked():
    shares = torch.tensor([0.4, 0.05, 0.3, 0.01, 0.2, 0.03, 0.01])
    page = _demo_answers.bars(CLASSES, shares, before=shares.flip(0))
    assert re.findall(r"<span>(.*?)</span><b>(.*?) %", page) == [
        ("a &lt;b&gt;bold&lt;/b&gt; class", "40.0"),
        ("c", "30.0"),
        ("e", "20.0"),
        ("b", "5.0"),
        ("f", "3.0"),
    ]
    assert re.findall(r"left:(.*?)%", page) == ["1.00", "20.00", "30.00", "3.00", "5.00"]
    assert _demo_answers.bars(CLASSES[1:3], torch.tensor([0.1, 0.9])).count("<li>") == 2


def test_a_model_without_known_attention_keeps_the_rest_of_the_page():
    plain = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=7)
    page = _demo_answers.Answers(
        Classifier("vit", plain, CLASSES, DataConfig(source="folder", img_size=32))
    )
    assert page.block is None and page.heads == {}
    message = "<p>VisionTransformer has no attention whose map is known"
    assert page.attend(page.image, None, _demo_answers.ALL_HEADS).startswith(message)


@cache
def broken_files() -> dict[str, bytes]:
    """Twenty-three uploads that are no pictures, or not whole ones, or too large."""
    good = encoded(photo(), "JPEG")
    png = encoded(photo(), "PNG")
    bomb = encoded(Image.new("1", (12000, 12000)), "PNG")
    gray = Image.fromarray(np.full((5, 7), 0.5, np.float32))
    size = b"\0\x1f\0\x35"  # height and width in the header
    chunk = png.index(b"IDAT")
    return {
        "empty.png": b"",
        "byte.png": b"\0",
        "zeros.jpg": bytes(16384),
        "text.jpg": b"no picture\n" * 20,
        "page.jpg": b"<!doctype html><title>404 Not Found</title><script>alert(1)</script>",
        "script.svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "archive.png": b"PK\3\4" + bytes(200),
        "program.png": b"\x7fELF" + bytes(200),
        "half.jpg": good[: len(good) // 2],
        "tail.jpg": good[:-100],
        "no_end.jpg": good[:-2],
        "header.jpg": good[:150],
        "claims.jpg": good.replace(size, b"\xff\xdc\xff\xdc", 1),
        "half.png": png[: len(png) // 2],
        "signature.png": png[:8],
        "crc.png": png[: chunk + 9] + bytes([png[chunk + 9] ^ 255]) + png[chunk + 10 :],
        "bomb.png": bomb,
        "bomb.gif": b"GIF89a" + bytes([255] * 4) + bytes(20),
        "float.tiff": encoded(gray, "TIFF"),
        "half.webp": encoded(photo(), "WEBP")[:200],
        "half.gif": encoded(photo(), "GIF")[:300],
        "half.bmp": encoded(photo(), "BMP")[:300],
        "half.tiff": encoded(photo(), "TIFF")[:3000],
    }


@pytest.mark.parametrize("name", broken_files())
def test_broken_upload_is_refused_and_deleted(answers, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(broken_files()[name])
    with pytest.raises(UnreadableImageError, match=f"^cannot read image {name}: [^\n]+$"):
        answers.take(path)
    assert not path.exists()


@pytest.mark.data
def test_each_odd_and_broken_file_is_shown_or_refused(answers, tmp_path, datasets):
    refused = set()
    for source in manifest(datasets / "imagenet-1k-odd") + manifest(datasets / "corrupt"):
        path = Path(shutil.copy(source, tmp_path / source.name))
        try:
            image, shown = answers.take(path)
        except UnreadableImageError:
            refused.add(source.name)
        else:
            assert image.shape == (SIZE, SIZE, 3) and image.dtype == np.uint8
            assert html.escape(source.name) in shown
            assert answers.predict(image).count("<li>") == 5
        assert not path.exists()
    assert refused == set(REFUSED)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "there is no such file or folder"),
        ("folder", "neither a run, nor a checkpoint, nor a file of weights"),
        ("bare.safetensors", "no config.json"),
    ],
)
def test_command_line_names_what_is_wrong_with_the_checkpoint(tmp_path, capsys, name, message):
    (tmp_path / "folder").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "bare.safetensors")
    assert demo.main(["--checkpoint", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_port_that_does_not_exist_is_named(capsys):
    assert demo.main(["--checkpoint", "none", "--port", "65536"]) == 2
    assert "--port=65536 is not possible: must be in [0, 65535]" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_page_that_others_can_reach_is_warned_of(tmp_path, capsys, host):
    assert demo.main(["--checkpoint", str(tmp_path / "none"), "--host", host]) == 2
    warned = f"warning: whoever reaches {host} can use the page" in capsys.readouterr().err
    assert warned == (host == "0.0.0.0")


GUARDED = """
import sys

def hook(event, args):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(args[1], tuple)):
        host = args[0] if event == "socket.getaddrinfo" else args[1][0]
        if host not in ("127.0.0.1", "localhost", "::1", "0.0.0.0", None):
            print("beyond loopback:", host, file=sys.stderr, flush=True)

sys.addaudithook(hook)
from scripts.demo import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Server:
    """The script in a process of its own, with a folder of its own for temporary files."""

    address: str
    temporary: Path

    def files(self) -> list[Path]:
        """Whatever has content."""
        return [p for p in self.temporary.rglob("*") if p.is_file() and p.stat().st_size]


@contextmanager
def serving(folder: Path):
    pytest.importorskip("gradio")
    write_network(folder)
    temporary, log = folder / "temporary", folder / "log"
    temporary.mkdir()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", GUARDED, "--checkpoint", str(folder)],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout.readline().startswith("weights     ")
        line = process.stdout.readline()
        assert line.startswith("open http://127.0.0.1:"), log.read_text()
        yield Server(line.split()[1], temporary)
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert list(temporary.iterdir()) == []
        assert "beyond loopback" not in log.read_text()
    finally:
        process.kill()
        process.communicate()


def post(address: str, body: bytes, kind: str = "application/json") -> str:
    request = urllib.request.Request(address, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def upload(server: Server, name: str, content: bytes) -> str:
    """Path on the server of an uploaded file."""
    edge = uuid.uuid4().hex
    head = f'--{edge}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    body = head.encode() + content + f"\r\n--{edge}--\r\n".encode()
    kind = f"multipart/form-data; boundary={edge}"
    return json.loads(post(f"{server.address}gradio_api/upload", body, kind))[0]


def submit(server: Server, path: str) -> str:
    """What the server answers to an upload."""
    session = uuid.uuid4().hex
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    event = {"data": [file], "fn_index": 0, "session_hash": session}
    post(f"{server.address}gradio_api/queue/join", json.dumps(event).encode())
    stream = f"{server.address}gradio_api/queue/data?session_hash={session}"
    with urllib.request.urlopen(stream, timeout=60) as answer:
        return answer.read().decode()


def is_taken(server: Server) -> bool:
    event = {"data": [None], "fn_index": 0, "session_hash": "many"}
    try:
        return bool(post(f"{server.address}gradio_api/queue/join", json.dumps(event).encode()))
    except urllib.error.HTTPError as error:
        return error.code != 503


@pytest.mark.slow
def test_server_keeps_no_upload_and_reads_no_other_file(answers, tmp_path):
    with serving(tmp_path) as server:
        from scripts._demo_page import QUEUE  # it needs gradio

        content = encoded(photo(), "PNG")
        path = upload(server, "my photo.png", content)
        assert Path(path).read_bytes() == content
        _, shown = answers.look(EncodedPicture(content, "my photo.png"), "my photo.png")
        assert json.dumps(shown)[1:-1] in submit(server, path)
        refused = submit(server, upload(server, "<i>.png", content[:99]))
        assert "cannot read image" in refused and "truncated" in refused and "<i>" not in refused
        with pytest.raises(urllib.error.HTTPError, match="413"):
            upload(server, "large.png", bytes(MAX_UPLOAD + 1))
        assert server.files() == []

        outside = tmp_path / "outside.png"
        outside.write_bytes(content)
        assert '"success":false' in submit(server, str(outside))
        assert outside.read_bytes() == content
        assert not all(is_taken(server) for _ in range(5 * QUEUE)), "the queue has no end"


def wait(browser: Browser, condition: str, seconds: float = 60) -> None:
    """Until a JavaScript expression is true."""
    end = time.monotonic() + seconds
    while not browser.evaluate(condition):
        assert time.monotonic() < end, (
            f"{condition} in {browser.evaluate('document.body.innerText')}"
        )
        time.sleep(0.05)


def choose(browser: Browser, path: Path) -> None:
    """As if the file had been dropped."""
    wait(browser, "document.querySelector('input[type=file]')")
    root = browser.cdp("DOM.getDocument")["root"]["nodeId"]
    found = browser.cdp("DOM.querySelector", nodeId=root, selector="input[type=file]")
    browser.cdp("DOM.setFileInputFiles", nodeId=found["nodeId"], files=[str(path)])


def press(browser: Browser, label: str) -> None:
    """Clicks the button with a label."""
    buttons = "[...document.querySelectorAll('button')]"
    browser.evaluate(f"{buttons}.find(b => b.innerText.trim() === {json.dumps(label)}).click()")


def says(words: str) -> str:
    return f"document.body.innerText.includes({json.dumps(words)})"


@pytest.mark.slow
def test_page_in_a_browser(tmp_path):
    with serving(tmp_path) as server, Browser() as browser:
        for width, dark in ((390, True), (1280, False)):
            browser.open(server.address, width=width, dark=dark)
            wait(browser, "document.querySelectorAll('.bars').length == 2")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (int(re.findall(r"\d+", background)[0]) < 128) == dark

        good = tmp_path / "my photo.png"
        good.write_bytes(encoded(photo(), "PNG"))
        choose(browser, good)
        wait(browser, says("my photo.png, 53 x 31 pixels, as the model sees it: 24 x 24"))
        corrupt = ROOT / "datasets" / "corrupt"
        real = [corrupt / name for name in REFUSED if (corrupt / name).exists()]
        for name, content in broken_files().items():
            (tmp_path / name).write_bytes(content)
        for path in (*(tmp_path / name for name in broken_files()), *real):
            choose(browser, path)
            alert = "document.querySelector('[role=alert]')"
            wait(browser, f"{alert} && {alert}.innerText.includes({json.dumps(path.name)})")
        large = tmp_path / "large.png"
        large.write_bytes(bytes(MAX_UPLOAD + 1))
        choose(browser, large)
        wait(browser, says("maximum allowed size"))
        assert browser.evaluate(says("my photo.png, 53 x 31"))

        press(browser, "flower")
        wait(browser, says("flower, 640 x 427 pixels"))
        assert not browser.evaluate("document.querySelector('[role=alert]')")
        press(browser, "Estimate the local Lipschitz constant")
        wait(browser, "document.querySelector('figcaption strong')")
        before = browser.evaluate("document.querySelectorAll('.bars')[1].innerText")
        moved = "new Event('input', {bubbles: true})"
        browser.evaluate(
            f"(slider => {{ slider.value = 0.5; slider.dispatchEvent({moved}) }})"
            "(document.querySelector('input[type=range]'))"
        )
        wait(browser, f"document.querySelectorAll('.bars')[1].innerText !== {json.dumps(before)}")
        assert server.files() == []
        assert all(url.startswith((server.address, "data:")) for url in browser.requests())
        expected = ("Method not implemented", "413")  # Gradio's at every answer; the large file
        assert not [m for m in browser.console() if not any(words in m for words in expected)]
