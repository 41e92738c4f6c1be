"""The calibration file: what is wrong is said with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from opdcheck.calibration.file import Calibration, load_calibration
from opdcheck.errors import ConfigError
from opdcheck.yamlfile import Located


def test_loads(calibration_file: Path) -> None:
    calibration = load_calibration(calibration_file).value
    assert calibration.method.kind == "opd"
    assert calibration.metric == "tv"
    assert calibration.margin == 0.1


def test_the_examples_load() -> None:
    for name in ("addition", "smollm2-pruned"):
        path = Path(__file__).parents[2] / "examples" / name / "calibration.yaml"
        if (
            name == "smollm2-pruned"
            and not Path("~/.cache/opdcheck/students/smollm2-135m-pruned").expanduser().exists()
        ):
            continue
        assert load_calibration(path).value.ladder.noise


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: [0, 1, 2]", "seeds: [0, 1]", "12: seeds: expected at least 3 different seeds, found [0, 1]"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, 2, 2]", "12: seeds: expected each seed once"),
        ("seeds: [0, 1, 2]", "seeds: [-1, 1, 2]", "12: seeds[0]: expected a number of at least 0"),
        ("budget: budget.yaml", "budget: budget.html", "budget: expected a file that ends in .yaml"),
        ("noise: [0.05, 0.1, 0.3]", "noise: [0.3]", "expected at least 5 levels of mismatch"),
        ("noise: [0.05, 0.1, 0.3]", "noise: [0.3, 0.1, 0.05]", "expected rising values"),
        ("staleness: [1, 2]", "logit_noise: [0.1, 0.2]", "expected levels of at least 2 sources"),
        ("staleness: [1, 2]", "staleness: [1, 3]", "11: ladder.staleness: expected lags below method.steps (3)"),
        ("steps: 3", "steps: 3, kind: rl, batch_size: 4", "the key is given twice"),
        ("beta: 0.5", "beta: 1.5", "beta"),
        ("dtype: float32}\nmethod", "dtype: float32, kv_cache_dtype: fp8}\nmethod", "levels of mismatch belong in"),
        ('pattern: ";([0-9]+)$"', 'pattern: ";[0-9]+$"', "expected exactly one group"),
        ('pattern: ";([0-9]+)$"', 'pattern: "("', "expected a regular expression"),
        ("budget: budget.yaml", "budget: .", "expected a file to write, found a folder"),
        ("margin", "margni", None),
    ],
)
def test_mistakes(calibration_file: Path, old: str, new: str, message: str | None) -> None:
    text = calibration_file.read_text()
    if message is None:
        calibration_file.write_text(text + "margni: 0.1\n")
        message = "margin"
    else:
        assert old in text
        calibration_file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_calibration(calibration_file)
    assert message in str(caught.value)
    assert str(calibration_file) in str(caught.value)


def test_rl_needs_a_verifier_and_whole_groups(calibration_file: Path) -> None:
    text = calibration_file.read_text().replace("beta: 0.5, steps: 3", "kind: rl, steps: 3")
    calibration_file.write_text("\n".join(line for line in text.splitlines() if "verifier" not in line))
    with pytest.raises(ConfigError, match="verifier: needed by"):
        load_calibration(calibration_file)
    calibration_file.write_text(text)
    with pytest.raises(ConfigError, match=r"multiple of method\.group_size") as caught:
        load_calibration(calibration_file)
    assert "quality: expected `accuracy` with `method.kind: rl`" in str(caught.value)


def test_accuracy_needs_a_verifier(calibration_file: Path) -> None:
    text = calibration_file.read_text() + "quality: accuracy\n"
    assert load_calibration_text(calibration_file, text).value.quality == "accuracy"
    without = "\n".join(line for line in text.splitlines() if "verifier" not in line)
    with pytest.raises(ConfigError, match="verifier: needed by `quality: accuracy`"):
        load_calibration_text(calibration_file, without)


def load_calibration_text(path: Path, text: str) -> Located[Calibration]:
    path.write_text(text)
    return load_calibration(path)
