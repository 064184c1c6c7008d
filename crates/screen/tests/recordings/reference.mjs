// What xterm.js shows for each recording, cell by cell: `npm install @xterm/headless @xterm/addon-unicode11`, then
// `node reference.mjs`. Writes NAME.cells beside NAME.bin: a line per screen line, `{style}text` per run of one style.
import { readFileSync, readdirSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
const require = createRequire(process.cwd() + '/');
const { Terminal } = require('@xterm/headless');
const { Unicode11Addon } = require('@xterm/addon-unicode11');
const folder = new URL('.', import.meta.url).pathname;

function colour(kind, isPalette, isRgb, value) {
  if (isPalette) return [`${kind} 5;${value}`];
  if (isRgb) return [`${kind} 2;${value >> 16};${(value >> 8) & 255};${value & 255}`];
  return [];
}

function style(cell) {
  const flags = { 1: cell.isBold(), 2: cell.isDim(), 3: cell.isItalic(), 4: cell.isUnderline(), 7: cell.isInverse(), 8: cell.isInvisible(), 9: cell.isStrikethrough() };
  return [
    ...Object.keys(flags).filter((flag) => flags[flag]),
    ...colour('fg', cell.isFgPalette(), cell.isFgRGB(), cell.getFgColor()),
    ...colour('bg', cell.isBgPalette(), cell.isBgRGB(), cell.getBgColor()),
  ].sort();
}

for (const file of readdirSync(folder).filter((file) => file.endsWith('.bin'))) {
  const terminal = new Terminal({ cols: 80, rows: 24, scrollback: 10000, allowProposedApi: true });
  terminal.loadAddon(new Unicode11Addon());
  terminal.unicode.activeVersion = '11';
  terminal.write(readFileSync(folder + file), () => {
    const buffer = terminal.buffer.active;
    let text = '';
    for (let y = 0; y < terminal.rows; y++) {
      const line = buffer.getLine(buffer.baseY + y);
      let last = '';
      for (let x = 0; x < terminal.cols; x++) {
        const cell = line.getCell(x);
        if (cell.getWidth() === 0) continue;
        const chars = cell.getChars() || ' ';
        const parts = style(cell).filter((part) => chars !== ' ' || !/^(fg|[123]$)/.test(part));
        const now = `{${parts.join(',')}}`;
        text += (now === last ? '' : now) + chars;
        last = now;
      }
      text += '\n';
    }
    text += `cursor ${buffer.cursorX},${buffer.cursorY} ${buffer.type} ${terminal.modes.bracketedPasteMode} ${terminal.modes.applicationCursorKeysMode} ${terminal.modes.mouseTrackingMode}\n`;
    writeFileSync(folder + file.replace('.bin', '.cells'), text);
  });
}
