"""Records what programs print into an 80x24 terminal: `python3 record.py NAME…`, or all. Needs vim, htop, less."""
import fcntl, os, pty, select, signal, struct, sys, tempfile, termios, time

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = "".join(f"{n:>4} {'lorem ipsum dolor sit amet ' * (n % 5 + 1)}\n" for n in range(1, 200))
C = "".join(f'/* part {n}: 日本語 */\nint f{n}(const char *s)\n{{\n\tfor (int i = 0; i < {n}; i++)\n\t\tprintf("%d\\n", i);\n\treturn {n};\n}}\n\n' for n in range(40))

# Name: command, then (keys, how long the program gets to answer).
RECORDINGS = {
    "vim": (["vim", "-u", "NONE", "-N", "--cmd", "set mouse=a ruler hlsearch incsearch background=dark laststatus=2 title ttimeoutlen=5 t_Co=256", "-c", "syntax on", "code.c"],
            ["", "\x06", "/return\r", ":vsplit\r", "\x17l20j", ":set nu\r", "Oa new line of text\x1b", "5dd", "V3j", ":set cursorline\r", "zz"]),
    "htop": (["bash", "-c", "sleep 1000 & a=$!; sleep 2000 & b=$!; yes > /dev/null & exec htop -d 5 -p $a,$b,$!,$$"], ["", "", "\x1b[B\x1b[B", "t", "", "\x1bOR", "p\x1b", ""]),
    "less": (["less", "-R", "text"], ["", " ", " ", "/dolor\r", "n", "50g", "-N\r", "j"]),
    "shell": (["bash", "--norc", "-i"],
              ["PS1='\\[\\e[1;32m\\]user@host\\[\\e[0m\\]:\\w\\$ '\r", "ls --color=always -la /usr\r", "cat text | head -60\r", "seq 1 300\r",
               "vim -u NONE -N code.c\r", "ihello\x1b", ":q!\r", "printf '\\e[41mred\\e[K\\e[0m\\n'\r", "echo a half-typed line that is rather longer than the terminal is wide, so that it wraps"]),
    "agent-inline": ([sys.executable, "-I", os.path.join(HERE, "agent.py"), "inline"], [""] * 8),
    "agent-full": ([sys.executable, "-I", os.path.join(HERE, "agent.py"), "full"], [""] * 5),
}

def record(name):
    command, keys = RECORDINGS[name]
    folder = tempfile.mkdtemp()
    open(folder + "/code.c", "w").write(C)
    open(folder + "/text", "w").write(TEXT)
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", LANG="C.UTF-8", LC_ALL="C.UTF-8", HOME=folder)
        time.sleep(0.1)
        os.execvp(command[0], command)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    data = b""
    for key in keys:
        os.write(fd, key.encode())
        until = time.time() + 0.7
        while time.time() < until:
            if select.select([fd], [], [], 0.05)[0]:
                data += os.read(fd, 65536)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    open(os.path.join(HERE, name + ".bin"), "wb").write(data)
    print(name, len(data))

for name in sys.argv[1:] or RECORDINGS:
    record(name)
