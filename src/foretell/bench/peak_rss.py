"""The child process that measures one arm's memory: load, complete one prompt, report the peak.

`python -m foretell.bench.peak_rss --arm NAME --engine JSON` prints one JSON document as its last line. A process of
its own, because a peak cannot be lowered again and two models in one process share it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from foretell.bench.settings import EngineSettings
from foretell.bench.suites import load_suite
from foretell.params import SamplingParams

NUM_TOKENS: Final = 32


def main(args: Sequence[str]) -> None:
    """Measure the arm that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m foretell.bench.peak_rss", description=__doc__)
    parser.add_argument("--arm", required=True, help="a drafter or a baseline")
    parser.add_argument("--engine", required=True, help="engine settings as a JSON object")
    options = parser.parse_args(args)
    run_arm(options.arm, EngineSettings.from_json(json.loads(options.engine)))
    sys.stdout.write(json.dumps({"peak_rss_bytes": peak_rss_bytes()}) + "\n")


def run_arm(name: str, engine: EngineSettings) -> None:
    """Load one arm and complete a fixed prompt with it."""
    from foretell.bench.baselines import BASELINES, open_baselines
    from foretell.bench.engine import load_llm

    (prompt,) = load_suite("builtin", category="summarization", limit=1)
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS)
    if name in BASELINES:
        (baseline,) = open_baselines([name], engine)
        baseline.measure(baseline.encode(prompt.text), sampling)
    else:
        llm = load_llm(engine)
        llm.generate(llm.tokenizer.encode(prompt.text), sampling, drafter=name)


def peak_rss_bytes() -> int:
    """Return the most memory that this process ever held resident.

    Linux keeps `ru_maxrss` across `exec`, so a child of a large process would report its parent's size; `VmHWM`
    belongs to the program that runs now.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv[1:])
