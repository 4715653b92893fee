"""The system calls that sandboxed programs may use, with their numbers on x86-64 and aarch64 (-: there is none).

A call that is not here is refused, whatever it does and however new it is. See Linux's tables of system calls.
"""

from __future__ import annotations

from collections.abc import Iterable

Numbers = tuple[int | None, int | None]


def table(text: str) -> dict[str, Numbers]:
    """`name=x86-64,aarch64 …` → call → its numbers."""
    return {name: (_number(x86), _number(arm)) for name, x86, arm in _rows(text)}


def _rows(text: str) -> Iterable[tuple[str, str, str]]:
    for row in text.split():
        name, _, numbers = row.partition("=")
        x86, _, arm = numbers.partition(",")
        yield name, x86, arm


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


NEWEST = 452
"""Numbers above it are answered as by a kernel that does not know them, so that the C library uses an older call."""

COMPUTING = table("""
read=0,63 write=1,64 readv=19,65 writev=20,66 lseek=8,62 close=3,57 fstat=5,80 poll=7,- ppoll=271,73 select=23,-
pselect6=270,72 mmap=9,222 munmap=11,215 mremap=25,216 mprotect=10,226 madvise=28,233 brk=12,214 futex=202,98
getrandom=318,278 getpid=39,172 gettid=186,178 rt_sigaction=13,134 rt_sigprocmask=14,135 rt_sigreturn=15,139
sigaltstack=131,132 nanosleep=35,101 clock_nanosleep=230,115 restart_syscall=219,128 sched_yield=24,124
clock_gettime=228,113 clock_getres=229,114 gettimeofday=96,169 time=201,- getrusage=98,165 times=100,153 exit=60,93
exit_group=231,94
""")
"""For code that computes: no call opens a file, makes a process or a thread, signals, or reaches a socket."""

AGENT = COMPUTING | table("""
pread64=17,67 pwrite64=18,68 preadv=295,69 pwritev=296,70 preadv2=327,286 pwritev2=328,287 close_range=436,436
dup=32,23 dup2=33,- dup3=292,24 pipe=22,- pipe2=293,59 flock=73,32 fsync=74,82 fdatasync=75,83 ftruncate=77,46
fallocate=285,47 fadvise64=221,223 sendfile=40,71 copy_file_range=326,285 splice=275,76 tee=276,77 fstatfs=138,44
getdents=78,- getdents64=217,61 fchdir=81,50 eventfd=284,- eventfd2=290,19 signalfd=282,- signalfd4=289,74
timerfd_create=283,85 timerfd_settime=286,86 timerfd_gettime=287,87 epoll_create=213,- epoll_create1=291,20
epoll_ctl=233,21 epoll_wait=232,- epoll_pwait=281,22 epoll_pwait2=441,441

open=2,- openat=257,56 openat2=437,437 creat=85,- stat=4,- lstat=6,- newfstatat=262,79 statx=332,291 statfs=137,43
access=21,- faccessat=269,48 faccessat2=439,439 readlink=89,- readlinkat=267,78 getcwd=79,17 chdir=80,49 mkdir=83,-
mkdirat=258,34 rmdir=84,- unlink=87,- unlinkat=263,35 rename=82,- renameat=264,38 renameat2=316,276 link=86,-
linkat=265,37 symlink=88,- symlinkat=266,36 mknod=133,- mknodat=259,33 truncate=76,45 umask=95,166 getxattr=191,8
lgetxattr=192,9 fgetxattr=193,10 listxattr=194,11 llistxattr=195,12 flistxattr=196,13

msync=26,227 mlock=149,228 munlock=150,229 membarrier=324,283
fork=57,- vfork=58,- execve=59,221 execveat=322,281 wait4=61,260 waitid=247,95 getppid=110,173 getpgid=121,155
getpgrp=111,- getsid=124,156 setpgid=109,154 setsid=112,157 getuid=102,174 geteuid=107,175 getgid=104,176
getegid=108,177 getresuid=118,148 getresgid=120,150 getgroups=115,158 set_tid_address=218,96 arch_prctl=158,-
set_robust_list=273,99 get_robust_list=274,100 rseq=334,293 futex_waitv=449,449 uname=63,160 sysinfo=99,179
getcpu=309,168 kill=62,129 tkill=200,130 tgkill=234,131 rt_sigpending=127,136 rt_sigtimedwait=128,137
rt_sigsuspend=130,133 pause=34,- alarm=37,- getitimer=36,102 setitimer=38,103 timer_create=222,107
timer_settime=223,110 timer_gettime=224,108 timer_getoverrun=225,109 timer_delete=226,111 sched_getaffinity=204,123
sched_getparam=143,121 sched_getscheduler=145,120 sched_get_priority_max=146,125 sched_get_priority_min=147,126
sched_rr_get_interval=148,127 getpriority=140,141 getrlimit=97,163 setrlimit=160,164

connect=42,203 bind=49,200 accept=43,202 accept4=288,242 recvfrom=45,207 recvmsg=47,212 recvmmsg=299,243
shutdown=48,210 getsockname=51,204 getpeername=52,205 setsockopt=54,208 getsockopt=55,209
""")
"""For agents' programs: files by name, processes and sockets of their own."""

IN_OWN_ROOM = table("""
listen=50,201 chmod=90,- fchmod=91,52 fchmodat=268,53 fchmodat2=452,452 chown=92,- fchown=93,55 lchown=94,-
fchownat=260,54 utime=132,- utimes=235,- futimesat=261,- utimensat=280,88 setxattr=188,5 lsetxattr=189,6
fsetxattr=190,7 removexattr=197,14 lremovexattr=198,15 fremovexattr=199,16
""")
"""Also for agents with files and a network of their own. Landlock does not keep these calls from files of others, nor
from listening at all addresses."""

BY_ARGUMENT = table("""
newfstatat=262,79 clone=56,220 ioctl=16,29 fcntl=72,25 prctl=157,167 prlimit64=302,261 setpriority=141,140
sched_setaffinity=203,122 socket=41,198 socketpair=53,199 sendto=44,206 sendmsg=46,211 sendmmsg=307,269
""")
"""Allowed by their arguments."""

UNKNOWN = table("clone3=435,435 memfd_create=319,279")
"""Answered as by an older kernel. Seccomp cannot read the flags of `clone3`; files of `memfd_create` are memory that no
limit counts."""
