"""Attacks of programs on files, processes and networks outside their sandbox: a table of Python code.

The code knows its victims by names: F a file in the directory D; P a process, whose memory at A is secret and which has
F open as FD; PORT something that listens; OTHER a key of System V's objects.
"""

from __future__ import annotations

import platform

from xray_runtime.kernel.confine.syscalls import table

NUMBERS = table("""
name_to_handle_at=303,264 open_by_handle_at=304,265 inotify_init1=294,26 inotify_add_watch=254,27 fanotify_init=300,262
fchmodat2=452,452 statx=332,291 tgkill=234,131 rt_sigqueueinfo=129,138 pidfd_open=434,434 pidfd_send_signal=424,424
pidfd_getfd=438,438 ptrace=101,117 process_vm_readv=310,270 process_vm_writev=311,271 kcmp=312,272 ioprio_set=251,30
ioprio_get=252,31 sched_setscheduler=144,119 shmget=29,194 msgget=68,186 semget=64,190 mq_open=240,180 add_key=248,217
io_uring_setup=425,425 userfaultfd=323,282 perf_event_open=298,241 bpf=321,280 memfd_secret=447,447 memfd_create=319,279
unshare=272,97 clone=56,220 clone3=435,435 setns=308,268 mount=165,40 umount2=166,39 open_tree=428,428 fsopen=430,430
move_mount=429,429 mount_setattr=442,442 pivot_root=155,41 process_madvise=440,440 move_pages=279,239 acct=163,89
sethostname=170,161 migrate_pages=256,238 quotactl=179,60 swapon=167,224 syslog=103,116 seccomp=317,277
setpriority=141,140 utimensat=280,88
""")
COLUMN = ["x86_64", "aarch64"].index(platform.machine())
SECRET = "SECRET-of-the-victim"
KEY = 0x5872617

HELPERS = """
import array, ctypes, errno, fcntl, mmap, os, pathlib, pty, resource, signal, socket, struct, sys, termios, time
def call(name, *arguments):
    given = [a.encode() if isinstance(a, str) else a for a in arguments]
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in given]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(NUMBERS[name]), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def vectors(address, size):
    mine = ctypes.create_string_buffer(size)
    pair = lambda start: (ctypes.c_size_t * 2)(start, size)
    return mine, pair(ctypes.addressof(mine)), pair(address)
def fields(size=128):
    return ctypes.create_string_buffer(size)
def owned(fd):
    fcntl.fcntl(fd, fcntl.F_SETOWN, P)
    fcntl.fcntl(fd, 10, 9)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC)
def type_for_another():
    if os.fork() == 0:
        os.setsid()
        _, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        try:
            fcntl.ioctl(terminal, termios.TIOCSTI, b"x")
            print("worked", flush=True)
        finally:
            os._exit(0)
    os.wait()
def cloned(flags):
    pid = call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    print("worked")
"""
# Their effect is seen outside.
CHANGES = {
    "chmod": "os.chmod(F, 0o666)",
    "chmod by a descriptor of the directory": "os.chmod('signing.pem', 0o666, dir_fd=os.open(D, os.O_PATH))",
    "chmod of the directory": "os.chmod(D, 0o711)",
    "chmod of a descriptor": "os.fchmod(os.open(F, os.O_RDONLY), 0o666)",
    "chmod of a path's descriptor": "os.chmod(f'/proc/self/fd/{os.open(F, os.O_PATH)}', 0o666)",
    "chmod through another's root": "os.chmod(f'/proc/{P}/root{F}', 0o666)",
    "chmod through another's files": "os.chmod(f'/proc/{P}/fd/{FD}', 0o666)",
    "fchmodat2": "call('fchmodat2', -100, F, 0o666, 0)",
    "utime": "os.utime(F, (1, 1))",
    "utime of a descriptor": "os.utime(os.open(F, os.O_RDONLY), (1, 1))",
    "utime of a path's descriptor": "call('utimensat', os.open(F, os.O_PATH), '', None, 0x1000)",
    "setxattr": "os.setxattr(F, 'user.x', b'1')",
    "setxattr of the directory": "os.setxattr(D, 'user.x', b'1')",
    "removexattr": "os.removexattr(F, 'user.kept')",
    "chown": "os.chown(F, 1, 1)",
    "lchown": "os.lchown(F, 1, 1)",
    "truncate": "os.truncate(F, 0)",
    "append": "open(F, 'a').write('x')",
    "a write to memory": "m = mmap.mmap(os.open(F, os.O_RDWR), 7)\nm[0:1] = b'Q'\nm.flush()",
    "rename": "os.rename(F, F + '.old')",
    "unlink": "os.unlink(F)",
    "a link": "os.link(F, D + '/link')",
    "a symbolic link": "os.symlink('a', D + '/link')",
    "a directory": "os.mkdir(D + '/new')",
    "a named pipe": "os.mkfifo(D + '/new')",
    "flags of a file": "fcntl.ioctl(os.open(F, os.O_RDONLY), 0x40086602, struct.pack('q', 0x40))",
    "prlimit": "resource.prlimit(P, resource.RLIMIT_NOFILE, (9, 9))",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, P, 7)",
    "setpriority of the group": "os.setpriority(os.PRIO_PGRP, P, 7)",
    "sched_setaffinity": "os.sched_setaffinity(P, [0])",
    "sched_setscheduler": "call('sched_setscheduler', P, 3, struct.pack('i', 0))",
    "ioprio_set": "call('ioprio_set', 1, P, (3 << 13))",
    "kill": "os.kill(P, signal.SIGKILL)",
    "stop": "os.kill(P, signal.SIGSTOP); time.sleep(0.1)",
    "kill of the group": "os.killpg(P, signal.SIGKILL)",
    "tgkill": "call('tgkill', P, P, 9)",
    "rt_sigqueueinfo": "call('rt_sigqueueinfo', P, 9, struct.pack('iii', 9, 0, -1) + bytes(116))",
    "pidfd_send_signal": "call('pidfd_send_signal', call('pidfd_open', P, 0), 9, None, 0)",
    "a signal by a pipe": "r, w = os.pipe(); owned(r); os.write(w, b'x'); time.sleep(0.1)",
    "memory written": "mine, here, there = vectors(A, 6); call('process_vm_writev', P, here, 1, there, 1, 0)",
    "memory written as a file": "m = open(f'/proc/{P}/mem', 'r+b', 0); m.seek(A); m.write(b'OTHERS')",
    "a process's oom score": "open(f'/proc/{P}/oom_score_adj', 'w').write('77')",
    "shmget": "call('shmget', OTHER, 4096, 0o1666)",
    "msgget": "call('msgget', OTHER, 0o1666)",
    "semget": "call('semget', OTHER, 1, 0o1666)",
    "mq_open": "call('mq_open', f'xray-{OTHER}', 0o102, 0o600, None)",
    "the kernel's settings": "p = '/proc/sys/kernel/printk_delay'; v = open(p).read(); open(p, 'w').write('1' + v)",
    "a connection by MSG_FASTOPEN": "socket.socket().sendto(b'x', socket.MSG_FASTOPEN, ('127.0.0.1', PORT))",
    "a connection": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "a connection by IPv6": "socket.create_connection(('::ffff:127.0.0.1', PORT), 2)",
    "a connection by MPTCP": "socket.socket(2, 1, 262).connect(('127.0.0.1', PORT))",
    "a datagram": "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT))",
    "a Unix socket": "socket.socket(socket.AF_UNIX).connect(D + '/unix')",
    "an abstract Unix socket": "socket.socket(socket.AF_UNIX).connect(f'\\0xray-{PORT}')",
}
# Their effect is what they print.
LEARNS = {
    "content": ("print(open(F).read())", "PRIVATE"),
    "content by a path upwards": ("print(open('../' * 9 + F).read())", "PRIVATE"),
    "content through another's root": ("print(open(f'/proc/{P}/root{F}').read())", "PRIVATE"),
    "content through another's files": ("print(open(f'/proc/{P}/fd/{FD}').read())", "PRIVATE"),
    "content by pidfd_getfd": (
        "print(os.pread(call('pidfd_getfd', call('pidfd_open', P, 0), FD, 0), 99, 0))",
        "PRIVATE",
    ),
    "content by a handle": (
        "h = fields(); h[0] = b'\\x78'; call('name_to_handle_at', -100, F, h, fields(4), 0); print('worked')",
        "worked",
    ),
    "size": ("print('size', os.stat(F).st_size)", "size 777"),
    "size by a path's descriptor": ("print('size', os.fstat(os.open(F, os.O_PATH)).st_size)", "size 777"),
    "existence": ("print('there', os.path.exists(F))", "there True"),
    "existence by access": ("print('there', os.access(F, os.F_OK))", "there True"),
    "existence of a directory": ("os.chdir(D); print('worked')", "worked"),
    "a link's target": ("print(os.readlink(D + '/hint'))", "the-target"),
    "an attribute": ("print(os.getxattr(F, 'user.kept'))", "kept-value"),
    "names": ("print(os.listdir(D))", "signing.pem"),
    "events": ("print('w', call('inotify_add_watch', call('inotify_init1', 0), D, 0xfff))", "w 1"),
    "events of a directory": ("fcntl.fcntl(os.open(D, 0), 1026, 1); print('worked')", "worked"),
    "all events": ("call('fanotify_init', 0, 0); print('worked')", "worked"),
    "a lease": ("fcntl.fcntl(os.open(F, 0), 1024, 0); print('worked')", "worked"),
    "a lock": ("fcntl.flock(os.open(F, 0), fcntl.LOCK_EX); print('worked')", "worked"),
    "memory": ("m, h, t = vectors(A, 20); call('process_vm_readv', P, h, 1, t, 1, 0); print(m.raw)", SECRET),
    "memory as a file": ("m = open(f'/proc/{P}/mem', 'rb', 0); m.seek(A); print(m.read(20))", SECRET),
    "variables": ("print(open(f'/proc/{P}/environ').read())", SECRET),
    "the command line": ("print(open(f'/proc/{P}/cmdline').read())", "signing.pem"),
    "ptrace": ("call('ptrace', 0x4206, P, 0, 0); print('worked')", "worked"),
    "kcmp": ("print('same', call('kcmp', P, P, 0, FD, FD))", "same 0"),
    "limits of another": ("resource.prlimit(P, resource.RLIMIT_NOFILE); print('worked')", "worked"),
    "process_madvise": (
        "call('process_madvise', call('pidfd_open', P, 0), vectors(A, 4096)[2], 1, 20, 0); print('worked')",
        "worked",
    ),
    "io_uring": ("call('io_uring_setup', 4, fields()); print('worked')", "worked"),
    "userfaultfd": ("call('userfaultfd', 1); print('worked')", "worked"),
    "perf": (
        "a = fields(); a[0:8] = struct.pack('II', 1, 120); call('perf_event_open', a, P, -1, -1, 0); print('worked')",
        "worked",
    ),
    "bpf": ("call('bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(112), 128); print('worked')", "worked"),
    "memory without a limit": ("call('memfd_create', 'x', 0); print('worked')", "worked"),
    "secret memory": ("call('memfd_secret', 0); print('worked')", "worked"),
    "a key": ("call('add_key', 'user', 'xray-test', 'x', 1, -4); print('worked')", "worked"),
    "the kernel's log": ("call('syslog', 10, None, 0); print('worked')", "worked"),
    "namespaces": ("call('unshare', 0x10000000); print('worked')", "worked"),
    "a namespace of files": ("call('unshare', 0x00020000); print('worked')", "worked"),
    "namespaces by clone": ("cloned(0x10000000)", "worked"),
    "a network by clone": ("cloned(0x50000000)", "worked"),
    "namespaces by clone3": (
        "p = call('clone3', struct.pack('11Q', 0x10000000, 0, 0, 0, 17, *[0] * 6), 88)\nif p == 0: os._exit(0)\n"
        "print('worked')",
        "worked",
    ),
    "another's namespaces": ("call('setns', os.open(f'/proc/{P}/ns/net', 0), 0); print('worked')", "worked"),
    "namespaces by a pidfd": ("call('setns', call('pidfd_open', P, 0), 0x04000000); print('worked')", "worked"),
    "a mount": (
        "os.mkdir('m'); call('unshare', 0x20000); call('mount', 'n', 'm', 'tmpfs', 0, None); print('worked')",
        "worked",
    ),
    "a tree of mounts": ("call('open_tree', -100, '/', 0); print('worked')", "worked"),
    "a new file system": ("call('fsopen', 'tmpfs', 0); print('worked')", "worked"),
    "another root": ("os.chroot('/'); print('worked')", "worked"),
    "a terminal's input": ("type_for_another()", "worked"),
    "a supervisor of calls": (
        "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\n"
        "p = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))\n"
        "call('seccomp', 1, 8, struct.pack('HxxxxxxQ', 1, ctypes.addressof(p))); print('worked')",
        "worked",
    ),
    "a socket of the kernel": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9); print('worked')", "worked"),
    "a raw socket": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('worked')", "worked"),
    "a socket of the machine": ("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); print('worked')", "worked"),
    "a socket of ciphers": ("socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); print('worked')", "worked"),
}
LANDLOCK_ALLOWS = {
    *("size", "size by a path's descriptor", "existence", "existence by access", "existence of a directory"),
    *("a link's target", "an attribute", "the command line"),
}
"""Why Landlock alone must be accepted."""
