"""`python -m prefill_worker`: one prefill worker as a process. `--help` lists its configuration."""

import sys

from kvferry.config import PrefillConfig, read_config
from kvferry.errors import ConfigurationError
from kvferry.process import run_process, set_up_logs
from kvferry.worker.process import serve_worker
from prefill_worker.worker import PrefillWorker


async def serve(arguments: list[str]) -> None:
    """Within another program, from the same flags: until cancelled. Raises ConfigurationError or JoinRefused."""
    await serve_worker(read_config(PrefillConfig, arguments), PrefillWorker)


def main() -> int:
    try:
        config = read_config(PrefillConfig)
    except ConfigurationError as error:
        print(error.message, file=sys.stderr)
        return 2
    set_up_logs(config.log_level, config.name or "prefill")
    return run_process(serve_worker(config, PrefillWorker, is_process=True), config.with_parent)


if __name__ == "__main__":
    sys.exit(main())
