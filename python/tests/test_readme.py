"""The code blocks of the READMEs run unchanged, if the modules that they need are installed."""

import re

import pytest

from mock_driver import MOCK_DRIVER, PRELUDE, mock_driver_environment
from readme_examples import ROOT, examples


def test_the_example_of_the_main_readme_runs(run_in_subprocess):
    out, _ = run_in_subprocess(examples("README.md")[0])
    assert out.endswith("1228308480 5242880\n")


STREAM = (
    PRELUDE
    + """
import contextlib
import torch
torch.Tensor.to = lambda self, *_, **__: self.clone()
stream = type("Stream", (), {"cuda_stream": new_stream(), "device": torch.device("cuda", 0), "record_event": lambda: None, "wait_event": lambda event: None})
torch.cuda.is_available, torch.cuda.current_stream, torch.cuda.stream = lambda: True, lambda *_: stream, contextlib.nullcontext
torch.cuda.Stream = torch.cuda.current_stream
"""
)
DATALOADER = (
    STREAM
    + """
import warnings
warnings.simplefilter("ignore")  # torch warns if there are fewer cores than workers.
dataset = torch.utils.data.TensorDataset(torch.arange(200), torch.arange(200) % 10)
seen = []
def train(images, labels): seen.extend(zip(images.tolist(), labels.tolist()))
"""
)
LOADER = (
    STREAM
    + """
from PIL import Image
for number in range(7):
    os.makedirs(f"photos/class{number % 2}", exist_ok=True)
    Image.new("RGB", (300, 280), (number, 0, 0)).save(f"photos/class{number % 2}/{number}.png")
seen = []
def train(images, labels): seen.extend((tuple(images.shape), int(label), round(float(image[0, 0, 0]) * 255) % 2) for image, label in zip(images, labels))
"""
)
LIGHTNING = (
    STREAM
    + """
pool = pinpool.Pool()
"""
)
AFTER_LIGHTNING = """
batch = {"images": pool.empty(9, "uint8", library="torch"), "labels": torch.zeros(9), "masks": (torch.empty(0), "name")}
hold(stream.cuda_stream)
Model().transfer_batch_to_device(batch, torch.device("cuda"), 0)
del batch
print(buffer_counts(pool)[:2])
let_run(stream.cuda_stream)
"""
EXAMPLES = examples("python/README.md") + examples("README.md")[1:]
#: For each of them: the modules that it needs, code before and after it, and the end of the output.
BLOCKS = [
    ("torch ninja", "", "print(pinpool.torch.uninstall())", "0\n"),
    ("torch", DATALOADER, "print(seen == [(at, at % 10) for at in range(200)], shared.counts()['received'])", "True 0\n"),
    ("numpy", "", "", ", 1 view> 1536.0\n8192\n"),
    ("PIL torch", LOADER, "print(len(seen), {each[0] for each in seen}, all(each[1] == each[2] for each in seen))", "21 {(7, 3, 224, 224)} True\n"),
    ("lightning torch", LIGHTNING, AFTER_LIGHTNING, "(1, 0)\n"),
    ("", "", "", "to do: request a smaller buffer, or raise PINPOOL_MAX_BYTES to 1.0GiB\n"),
    ("torch ninja", "", "print(pinpool.torch.uninstall())", "0\n"),
]


@pytest.mark.skipif(MOCK_DRIVER is None, reason="the mock driver is not built")
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_the_other_examples_of_the_readmes_run(index, run_in_subprocess, tmp_path, monkeypatch):
    modules, setup, teardown, expected_output = BLOCKS[index]
    for module in modules.split():
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    out, _ = run_in_subprocess(setup + EXAMPLES[index] + teardown, env=mock_driver_environment(tmp_path))
    assert out.endswith(expected_output)


def test_each_block_of_the_readmes_is_run():
    assert len(EXAMPLES) == len(BLOCKS)
    assert len((ROOT / "python/README.md").read_text().splitlines()) <= 170


def test_the_example_of_the_readme_has_ten_lines():
    lines = [line for line in examples("README.md")[0].splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 10


def anchors(text):
    """Returns the anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [page for folder in (".", "docs", "python", "crates/*", "examples/*", "fuzz", "tests/data/*") for page in sorted(ROOT.glob(f"{folder}/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if ":" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
