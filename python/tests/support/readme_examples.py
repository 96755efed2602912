"""The Python code blocks of the READMEs."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[3]


def examples(readme):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / readme).read_text(), re.M | re.S)
