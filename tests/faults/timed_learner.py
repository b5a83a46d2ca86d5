"""A learner that notes its env steps and updates, and when.

Run as `python -m tests.faults.timed_learner RUN '{"game": …, "host": …, "port": …, …}'`; the notes
are in the file `notes` beside the run, which ends once there is a file `stop` beside it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import understudy
from understudy.training.events import Event, Stop
from understudy.workers.team import WorkersConfig


def main(run: Path, facts: dict[str, Any]) -> None:
    listen = WorkersConfig(host=facts["host"], port=int(facts["port"]), insecure=True)
    with run.with_name("notes").open("w", buffering=1) as notes:

        def on_event(event: Event) -> object:
            if hasattr(event, "env_steps"):
                updates = getattr(event, "updates", -1)
                text = getattr(event, "what", "")
                notes.write(json.dumps([time.monotonic(), event.env_steps, updates, text]) + "\n")
            return Stop if run.with_name("stop").exists() else None

        learned = understudy.LearnerNode(
            facts["game"],
            algorithm="dqn",
            listen=listen,
            steps=facts["steps"],
            settings=facts["settings"],
            out=run,
            on_event=on_event,
            options=understudy.TrainOptions(wrapper=facts["wrapper"]),
        ).serve()
    print(json.dumps(learned.result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
