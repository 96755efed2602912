"""The examples of the READMEs run as they stand there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def examples(readme):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / readme).read_text(), re.M | re.S)


@pytest.mark.parametrize(("readme", "at", "said"), [("README.md", 0, "1228308480 1\n"), ("python/README.md", 1, ", 1 view> 1536.0\n2\n")])
def test_the_example_of_a_pool_runs(readme, at, said, alone):
    out, _ = alone(examples(readme)[at])
    assert out.endswith(said)


def test_the_example_of_a_dataloader_runs(alone):
    pytest.importorskip("torch")
    before = """
import torch, warnings
warnings.simplefilter("ignore")  # Of torch, that there are fewer cores than workers.
dataset = torch.utils.data.TensorDataset(torch.arange(200), torch.arange(200) % 10)
seen = []
def train(images, labels): seen.extend(zip(images.tolist(), labels.tolist()))
"""
    out, _ = alone(before + examples("python/README.md")[0] + "print(seen == [(at, at % 10) for at in range(200)], shared.counts()['held'])")
    assert out == "True 1\n", "the last batch is the loop's"


def test_the_example_of_the_readme_has_ten_lines():
    lines = [line for line in examples("README.md")[0].splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 10


def anchors(text):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [page for folder in (".", "docs", "python", "capi", "crates/*", "examples/*", "fuzz") for page in sorted(ROOT.glob(f"{folder}/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if ":" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
