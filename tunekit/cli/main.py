"""The `tune` command. Imports nothing slow: the module of a subcommand is imported when it is called."""

import _thread
import argparse
import keyword
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tunekit.cli.parsers import VERBS, Parser, make_parser
from tunekit.config.process_guard import ProcessGuard
from tunekit.config.secrets import message_text
from tunekit.config.user_code import user_files
from tunekit.errors import RunStopped, UserError, did_you_mean, find_user_code, is_ctrl_c, raise_ctrl_c
from tunekit.kernels import cache_dir
from tunekit.system import imports_without_gc

OUT_OF_MEMORY = re.compile(
    "allocate memory|can't start new thread|failed to map segment|out of memory"
    "|without exception set|without setting an exception"  # SystemError
)
THREAD_SECONDS = 5.0  # to wait for threads of the user before they are named


def dispatch_command(words: Sequence[str]) -> None:
    """Parse the arguments and run the subcommand."""
    is_verb = bool(words) and words[0] in VERBS
    top, parsers = make_parser(words[0] if is_verb and "_ARGCOMPLETE" not in os.environ else None)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import_module("tunekit.cli.commands.completion").complete(top, parsers)
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        hint = did_you_mean(words[0], VERBS)
        raise UserError(f"unknown subcommand '{words[0]}'.{hint} Run `tune --help` for a list.")
    if is_verb:
        end = words.index("--") if "--" in words else len(words)  # after it is a command of another program
        words = [*(normalize_option(word, parsers[words[0]]) for word in words[:end]), *words[end:]]
    args, rest = top.parse_known_args(words)
    args.words = tuple(words)
    if args.version:
        metadata = import_module("importlib.metadata")  # costs 25 ms; only --version needs it
        versions = (f"{name} {metadata.version(name)}" for name in ("tunekit", "torch"))
        print(*versions, f"Python {platform.python_version()}", sep=", ")
    elif args.verb is None:
        top.print_help()
    else:
        _merge_overrides(args, rest, parsers[args.verb])
        if "model" in args and not Path(args.model).is_file():  # before torch is imported, which takes seconds
            import_module("tunekit.hub.download").find_local_dir(args.model)
        with imports_without_gc():
            command = import_module(f"tunekit.cli.commands.{args.verb}{'_' if keyword.iskeyword(args.verb) else ''}")
        command.main(args)


def normalize_option(word: str, verb: Parser) -> str:
    """Replace underscores in the name of an option, as in `--nproc_per_node=2`. Other arguments are unchanged."""
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if name.startswith("--") and dashed in verb._option_string_actions else word


def _merge_overrides(args: argparse.Namespace, rest: list[str], verb: Parser) -> None:
    """Add the arguments that argparse did not consume: overrides after an option. Reject all others."""
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if unknown:
        options = [name for name in verb._option_string_actions if name.startswith("--")]
        key, _, value = unknown[0].lstrip("-").partition("=")
        hint = f"Keys of the config have no dashes: {key}={value or 'VALUE'}." if "overrides" in args else ""
        verb.error(f"unknown argument '{unknown[0]}'.{did_you_mean(unknown[0], options, hint)}")
    if rest:
        args.overrides += rest


def set_torch_env() -> None:
    """Set the variables that torch reads when it is imported. Variables set by the user are kept."""
    # Limit busy waiting of OpenMP threads. On two cores, training the nano reaches 3,400 to 4,000 tokens/s (default:
    # 3,900 to 4,700), but 1,900 instead of 119 if another process uses the same cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Pages of 2 MB for large tensors on the CPU; see tunekit/kernels/malloc.py for measurements.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Expandable segments on GPUs: batches of varying length do not fragment memory.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which torch reads if the newer one is not set
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Keep compiled code across reboots: the default directory of torch is in /tmp.
    inductor_dir = cache_dir.compile_cache_dir() / "inductor"
    if cache_dir.is_writable(inductor_dir):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_dir))
    cache_dir.set_compiler_cache_directories()


def open_standard_streams() -> None:
    """Replace closed standard streams by /dev/null, or the next files that are opened take their places."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115, PTH123


def redeliver_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Interrupt again if Ctrl-C came in a callback, where Python only reports exceptions."""
    if unraisable.exc_value is not None and is_ctrl_c(unraisable.exc_value):
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 2 after a UserError, 128 plus the signal number after a signal."""
    is_program, words = words is None, sys.argv[1:] if words is None else words
    open_standard_streams()
    sys.unraisablehook = redeliver_interrupt
    set_torch_env()
    with CtrlCHandler():
        code = run_command(words)
    if is_program:
        end_threads(code)
    return code


def run_command(words: Sequence[str]) -> int:
    """Run the subcommand. Returns the exit code, after the message of an error was printed."""
    try:
        with UserCodeErrors(), ProcessGuard(user_files):
            dispatch_command(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `tune ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError, MemoryError, RuntimeError, SystemError, ImportError) as error:
        if not isinstance(error, UserError | OSError) and not is_out_of_memory(error):
            raise
        if "--debug" in words:
            traceback.print_exc()
        print(f"error: {message_text(describe_error(error))}", file=sys.stderr)
        return 2
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        return 130
    return 0


class CtrlCHandler:
    """Context manager in which Ctrl-C raises an exception of its own class, unless SIGINT has another handler."""

    def __enter__(self) -> None:
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.is_installed = is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.is_installed:
            signal.signal(signal.SIGINT, raise_ctrl_c)

    def __exit__(self, *error: object) -> None:
        if self.is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_threads(code: int) -> None:
    """Name threads that keep the program alive, which only code of the user starts. After a failure, end with them."""
    main_thread, deadline = threading.main_thread(), time.monotonic() + THREAD_SECONDS
    threads = [thread for thread in threading.enumerate() if thread is not main_thread and not thread.daemon]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = ", ".join(thread.name for thread in threads if thread.is_alive())
    if names:
        action = "ending with" if code else "waiting for"
        print(f"warning: {action} threads that are still running: {names}", file=sys.stderr, flush=True)
        if code:
            with suppress(OSError, ValueError):  # the reader has closed the pipe, or the user the stream
                sys.stdout.flush()
            os._exit(code)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system refused memory or a thread to this process. Libraries report it in many ways."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


class UserCodeErrors:
    """Context manager that ends the command with exit code 1 after an exception in a file of the user.

    File and line are printed first, then the traceback from that line on. Other exceptions are bugs of tunekit.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (location := find_user_code(error)) is not None:
            raise RunStopped(f"error: {message_text(location.message)}\n{location.stack.rstrip()}", 1) from error


def describe_error(error: BaseException) -> str:
    """Message of an error; of the operating system with the name of the file."""
    if not isinstance(error, UserError) and is_out_of_memory(error):
        return f"out of memory: {str(error) or 'the system gives this process no more'}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
