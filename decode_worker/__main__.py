"""`python -m decode_worker`: one decode worker as a process. `--help` lists its configuration."""

import sys

from decode_worker.worker import DecodeWorker
from kvferry.config import DecodeConfig, read_config
from kvferry.errors import ConfigurationError
from kvferry.process import run_process, set_up_logs
from kvferry.worker.process import serve_worker


async def serve(arguments: list[str]) -> None:
    """Within another program, from the same flags: until cancelled. Raises ConfigurationError or JoinRefused."""
    await serve_worker(read_config(DecodeConfig, arguments), DecodeWorker)


def main() -> int:
    try:
        config = read_config(DecodeConfig)
    except ConfigurationError as error:
        print(error.message, file=sys.stderr)
        return 2
    set_up_logs(config.log_level, config.name or "decode")
    return run_process(serve_worker(config, DecodeWorker, is_process=True), config.with_parent)


if __name__ == "__main__":
    sys.exit(main())
