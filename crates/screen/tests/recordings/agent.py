"""A stand-in for a coding agent's TUI, for recording. `inline` redraws below its scrollback as Ink programs do;
`full` uses the alternate screen. Ends by waiting for its terminal to go away."""
import sys, time

def out(text):
    sys.stdout.write(text)
    sys.stdout.flush()
    time.sleep(0.003)

ESC = "\x1b"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

def rgb(r, g, b): return f"{ESC}[38;2;{r};{g};{b}m"
def bg(r, g, b): return f"{ESC}[48;2;{r};{g};{b}m"
RESET = f"{ESC}[0m"

def box(lines, width=60):
    yield f"{rgb(120,120,200)}╭{'─' * (width - 2)}╮{RESET}"
    for text, length in lines:
        yield f"{rgb(120,120,200)}│{RESET} {text}{' ' * (width - 4 - length)} {rgb(120,120,200)}│{RESET}"
    yield f"{rgb(120,120,200)}╰{'─' * (width - 2)}╯{RESET}"

def inline():
    out(f"{ESC}[?2004h{ESC}[?1004h{ESC}[>1u{ESC}[>4;2m{ESC}]0;✳ fix the parser{ESC}\\")
    for line in box([(f"{ESC}[1m✻ Welcome to the agent!{ESC}[22m", 23), (f"{ESC}[2mcwd: /home/user/project{ESC}[22m", 23)]):
        out(line + "\r\n")
    out(f"\r\n{ESC}[?25l")
    frame = 0
    for step in range(14):
        height = 0
        for tick in range(8):
            if height:
                out(f"{ESC}[2K{ESC}[1A" * (height - 1) + f"{ESC}[2K{ESC}[G")
            lines = [f"{rgb(215,119,87)}{SPINNER[frame % 10]} Thinking… {RESET}{ESC}[2m({frame}s · ↑ {frame * 37} tokens · esc to interrupt){RESET}", ""]
            lines += list(box([(f"> {ESC}[7m {ESC}[27m", 3)]))
            lines += [f"  {ESC}[38;5;246m? for shortcuts{ESC}[39m"]
            out(f"{ESC}[?2026h" + "\r\n".join(lines) + f"{ESC}[?2026l")
            height = len(lines)
            frame += 1
        out(f"{ESC}[2K{ESC}[1A" * (height - 1) + f"{ESC}[2K{ESC}[G")
        if step % 3 == 0:
            out(f"{ESC}[32m⏺{RESET} {ESC}[1mUpdate{ESC}[22m(src/parser_{step}.rs)\r\n")
            for n in range(3):
                out(f"    {n + 10} {bg(105,30,40)}{ESC}[97m -    let old = parse(input)?;{ESC}[K{RESET}\r\n")
                out(f"    {n + 10} {bg(34,92,43)}{ESC}[97m +    let new_value = parse_all(input).map_err(Error::from)?;{ESC}[K{RESET}\r\n")
        elif step % 3 == 1:
            out(f"{rgb(200,200,200)}⏺{RESET} " + "A long explanation that is wider than the terminal and wraps softly, because the "
                "program prints it in one go and lets the terminal do the rest; 日本語の説明文もここに入ります。 And then it ends.\r\n")
        else:
            out(f"{ESC}[4:3m{ESC}[58:2::255:80:80merror{ESC}[59m{ESC}[24m: {ESC}]8;;https://example.com/E{step}{ESC}\\E{step:04}{ESC}]8;;{ESC}\\ "
                f"{ESC}[3mitalic{ESC}[23m {ESC}[9mstruck{ESC}[29m {ESC}[2mdim{ESC}[22m e\u0301\u0323 combined\r\n")
    lines = [f"{rgb(215,119,87)}✻ Do you want to proceed?{RESET}", f"{ESC}[36m❯ 1. Yes{ESC}[39m", "  2. No"]
    out("\r\n".join(lines) + "\r\n" + "\r\n".join(box([("> ", 2)])))
    out(f"{ESC}[1A{ESC}[1A{ESC}[5G{ESC}[?25h")

def full():
    out("$ agent --full\r\n")
    out(f"{ESC}[?1049h{ESC}[22;0;0t{ESC}]2;agent: working{ESC}\\{ESC}[?1002h{ESC}[?1006h{ESC}[?2004h{ESC}[?1h{ESC}={ESC}[6 q")
    out(f"{ESC}[H{ESC}[2J{bg(30,30,46)}{ESC}[J")
    for y in range(1, 24):
        out(f"{ESC}[{y};1H{rgb(137,180,250)}│{ESC}[{y};80H│")
        for x in range(0, 78, 6):
            out(f"{ESC}[{y};{x + 2}H{bg(30 + y * 3, 40, 60 + x)}{rgb(255 - x, 220, 255 - y * 4)}{(x * y) % 997:>5}")
    out(f"{ESC}[3;20r{ESC}[20;1H{RESET}{bg(30,30,46)}")
    for n in range(30):
        out(f"\r\n{rgb(166,227,161)}  step {n:>2}: 編集 ファイル.rs ✅ ok")
    out(f"{ESC}[r{ESC}[24;1H{RESET}{ESC}[7m NORMAL {ESC}[27m{ESC}[38;5;244m 42% {ESC}[K")
    for n in range(20):
        out(f"{ESC}[24;40H{ESC}[33m{SPINNER[n % 10]}{RESET} {n * 5}%")
    out(f"{ESC}[3;20r{ESC}[12;34H{ESC}[38;5;208;1m")

{"inline": inline, "full": full}[sys.argv[1]]()
time.sleep(60)
