"""Runs the programs on stdin, after the process has given up everything that could do harm. Started by `sandbox.py`.

The order is: resource limits, file access (Landlock), system calls (seccomp). A step that fails ends the process with
code 120 before any line of the program runs. Imports only the standard library: it runs without tunekit.
"""

import ctypes
import itertools
import json
import linecache
import os
import platform
import resource
import struct
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

REFUSED = 120  # exit code if the process cannot be locked down
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

# Rights of Landlock: linux/landlock.h
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
MIN_ABI = 3  # earlier versions cannot forbid to truncate files
RIGHTS_BY_ABI = {3: 15, 4: 15}  # number of known rights; later versions have 16
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE, SET_PDEATHSIG, CAPBSET_DROP = 38, 22, 2, 1, 24

# Numbers of system calls: (x86_64, aarch64); None: the architecture has no such call.
DENIED = {
    # network
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # processes and signals
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "process_madvise": (440, 440), "setpgid": (109, 154),
    "setsid": (112, 157), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "setuid": (105, 146), "setgid": (106, 144),
    "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "setgroups": (116, 159), "setfsuid": (122, 151), "setfsgid": (123, 152), "capset": (126, 91),
    # metadata of files, and files that Landlock does not cover
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "mknod": (133, None),
    "mknodat": (259, 33), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "inotify_add_watch": (254, 27), "fallocate": (285, 47), "flock": (73, 32),
    "sync": (162, 81), "syncfs": (306, 267), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # attributes of files and targets of links, which Landlock does not cover
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "getxattrat": (464, 464), "listxattrat": (465, 465),
    "readlink": (89, None), "readlinkat": (267, 78),
    # memory and messages that are shared between processes
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "msgsnd": (69, 189),
    "shmctl": (31, 195), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192), "msgctl": (71, 187),
    "msgrcv": (70, 188), "mq_unlink": (241, 181), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # the kernel
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "personality": (135, 92), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "lookup_dcookie": (212, 18),
    "set_mempolicy": (238, 237), "mbind": (237, 235), "prlimit64": (302, 261), "setrlimit": (160, 164),
}  # fmt: skip
CLONE, CLONE3, KILL, TGKILL, FCNTL, IOCTL = (56, 220), (435, 435), (62, 129), (234, 131), (72, 25), (16, 29)
CLONE_THREAD, PRCTL = 0x10000, (157, 167)
SIGNAL_COMMANDS = (8, 10, 15, 1024, 1026)  # of fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS, ENOTTY = 1, 38, 25
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def check_call(result: int, name: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def set_limits(limits: dict) -> None:
    """Limits that the kernel enforces for this process."""
    for name, value in (
        ("CPU", limits["cpu_seconds"]),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
        ("MEMLOCK", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> None:
    """Give up the privileges of root. Needs none itself."""
    for capability in range(64):
        LIBC.prctl(CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one, and without privileges
    header = struct.pack("Ii", 0x20080522, 0)
    check_call(LIBC.capset(header, bytes(24)), "capset")


def restrict_files(directory: str) -> None:
    """Landlock: read the Python installation and system libraries; read and write `directory`; nothing else."""
    abi = check_call(LIBC.syscall(CREATE_RULESET, None, 0, 1), "landlock_create_ruleset")
    if abi < MIN_ABI:
        raise OSError(ENOSYS, f"Landlock has version {abi}, but {MIN_ABI} is needed (Linux 6.2)")
    handled = (1 << RIGHTS_BY_ABI.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]  # files, TCP, scopes
    ruleset = LIBC.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    check_call(ruleset, "landlock_create_ruleset")
    paths = sysconfig.get_paths()
    libraries = {
        paths["stdlib"],
        paths["platstdlib"],
        f"{sys.base_prefix}/lib",
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
    }
    rules = dict.fromkeys(libraries, READ_FILE | READ_DIR)
    rules |= dict.fromkeys(("/etc/ld.so.cache", "/dev/zero", "/dev/urandom"), READ_FILE)
    rules |= {"/dev/null": READ_FILE | WRITE_FILE}
    rules[directory] = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    for path, rights in rules.items():
        if Path(path).exists():
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights & handled, descriptor)
            check_call(LIBC.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
            os.close(descriptor)
    check_call(LIBC.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def restrict_system_calls() -> None:
    """Seccomp filter: no network, no new processes, no signals to others, no changes of the system."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"unknown architecture {machine}")
    column = ["x86_64", "aarch64"].index(machine)
    program = build_filter(AUDIT_ARCH[machine], column, os.getpid())
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    check_call(LIBC.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0), "seccomp")


def build_filter(arch: int, column: int, pid: int) -> list[tuple[int, int, int, int]]:
    """BPF program: (code, jump if true, jump if false, constant) for each instruction."""
    program = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, NUMBER)]
    if column == 0:  # numbers of the x32 ABI
        program += [(JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (RETURN, 0, 0, KILL_PROCESS)]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            program += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ERRNO | EPERM)]
    program += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | ENOSYS)]  # libc then calls clone
    program += on_argument(CLONE[column], 0, [(JUMP_BITS, 1, 0, CLONE_THREAD)], EPERM)
    for call in (KILL, TGKILL):
        program += on_argument(call[column], 0, [(JUMP_EQUAL, 1, 0, pid)], EPERM)
    allowed = HARMLESS_IOCTLS
    program += on_argument(
        IOCTL[column], 1, [(JUMP_EQUAL, len(allowed) - i, 0, v) for i, v in enumerate(allowed)], ENOTTY
    )
    denied = [(JUMP_EQUAL, len(SIGNAL_COMMANDS) - i, 0, v) for i, v in enumerate(SIGNAL_COMMANDS)]
    body = [(LOAD, 0, 0, ARGUMENTS + 8), *denied, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EPERM)]
    program += [(JUMP_EQUAL, 0, len(body), FCNTL[column]), *body]
    body = [
        (LOAD, 0, 0, ARGUMENTS),
        (JUMP_EQUAL, 1, 0, SET_PDEATHSIG),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | EPERM),
    ]
    program += [(JUMP_EQUAL, 0, len(body), PRCTL[column]), *body]
    return [*program, (RETURN, 0, 0, ALLOW)]


def on_argument(number: int, argument: int, tests: list[tuple[int, int, int, int]], error: int) -> list:
    """Allow a call if one of `tests`, which jump over the next instruction after them, holds for an argument."""
    offset = ARGUMENTS + 8 * argument
    body = [(LOAD, 0, 0, offset), *tests, (RETURN, 0, 0, ERRNO | error), (RETURN, 0, 0, ALLOW)]
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def lock_down(limits: dict, parent: int) -> None:
    """Give up all access. Raises OSError if a step is not possible."""
    check_call(LIBC.prctl(SET_PDEATHSIG, 9, 0, 0, 0), "prctl")  # the process ends with the one that started it
    if os.getppid() != parent:  # which has ended before this call
        os._exit(REFUSED)
    check_call(LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    drop_capabilities()
    set_limits(limits)
    restrict_files(limits["directory"])
    restrict_system_calls()


def main() -> None:
    """Run the program of the request, and then those of further lines, which come when the one before has ended."""
    lines, null = os.fdopen(os.dup(0), "rb"), os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)  # what comes later is not on stdin of the program
    os.close(null)
    request = json.loads(lines.readline())
    program, status = request["program"], request["status_fd"]
    try:
        lock_down(request["limits"], request["parent"])
    except (OSError, ValueError) as error:
        os.write(status, str(error).encode())
        os._exit(REFUSED)
    os.write(status, b"ok")
    sys.argv = ["program.py"]
    sys.excepthook = print_error
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    end_token = request.pop("end_token").encode()
    write, load, build, run, read = os.write, json.loads, compile, exec, lines.readline  # a program may replace them
    for number in itertools.count(1):
        name = "program.py" if number == 1 else f"program_{number}.py"
        linecache.cache[name] = (len(program), None, program.splitlines(keepends=True), name)
        run(build(program, name, "exec"), namespace)
        write(status, end_token)
        if not (line := read()):
            return
        program = load(line)


def print_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print an exception of the program without the frames of this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(kind, error, frames)


if __name__ == "__main__":
    main()
