//! Merging the journals of many streams into lines in the order of time. Blocks.

use super::MAX_LINE;
use crate::{Error, LogLine, LogSource};
use journal::{Chunk, Reader, TimeIndex};
use model::{Offset, Timestamp};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    path::PathBuf,
};
use wire::layout::JournalName;

/// Bytes read of a journal at once.
const CHUNK: usize = 64 * 1024;

/// Something that prints lines.
pub(crate) struct Stream {
    pub source: LogSource,
    pub name: &'static str,
    pub journal: JournalName,
    pub dir: PathBuf,
    /// Nothing of it is older.
    pub since: Timestamp,
    /// More may come.
    pub goes_on: bool,
}

/// How far a stream was merged.
pub(crate) struct Merged {
    pub source: LogSource,
    pub name: &'static str,
    pub journal: JournalName,
    pub goes_on: bool,
    pub position: Offset,
    /// The beginning of a line that isn't complete.
    pub partial: Vec<u8>,
}

/// Gives the lines of all streams to `give`, oldest first, until it says false. `None` where it did.
pub(crate) fn merge(
    streams: Vec<Stream>,
    since: Option<Timestamp>,
    mut give: impl FnMut(Result<LogLine, Error>) -> bool,
) -> Option<Vec<Merged>> {
    let mut lines: Vec<Lines> = streams.into_iter().map(|stream| Lines::new(stream, since)).collect();
    // Not opened before its time has come: there can be thousands.
    let mut heap: BinaryHeap<Reverse<(Timestamp, usize)>> =
        lines.iter().enumerate().map(|(at, lines)| Reverse((lines.stream.since, at))).collect();
    while let Some(Reverse((guess, at))) = heap.pop() {
        let stream = &mut lines[at];
        let given = match stream.peek() {
            // It was only the earliest that it could be.
            Ok(Some(time)) if time > guess => {
                heap.push(Reverse((time, at)));
                continue;
            }
            Ok(Some(time)) => {
                heap.push(Reverse((time, at)));
                stream.next().filter(|line| since.is_none_or(|since| line.at >= since)).is_none_or(|line| give(Ok(line)))
            }
            Ok(None) => {
                stream.close();
                true
            }
            Err(error) => {
                give(Err(error));
                false
            }
        };
        if !given {
            return None;
        }
    }
    // A line that never came to its end is a line all the same, once nothing can follow it.
    for stream in &mut lines {
        if !stream.stream.goes_on
            && let Some(line) = stream.rest()
            && since.is_none_or(|since| line.at >= since)
            && !give(Ok(line))
        {
            return None;
        }
    }
    Some(lines.into_iter().map(Lines::into_merged).collect())
}

/// The lines of one stream.
struct Lines {
    stream: Stream,
    open: Option<(Reader, TimeIndex)>,
    position: Offset,
    /// Set where reading began inside a line.
    skipping: bool,
    begun: bool,
    since: Option<Timestamp>,
    ready: VecDeque<(Timestamp, Vec<u8>)>,
    partial: Vec<u8>,
    partial_at: Timestamp,
    latest: Timestamp,
}

impl Lines {
    fn new(stream: Stream, since: Option<Timestamp>) -> Lines {
        let first = stream.since;
        Lines {
            stream,
            open: None,
            position: Offset::ZERO,
            skipping: false,
            begun: false,
            since,
            ready: VecDeque::new(),
            partial: Vec::new(),
            partial_at: first,
            latest: first,
        }
    }

    /// The line that [`Self::peek`] told of.
    fn next(&mut self) -> Option<LogLine> {
        let (at, bytes) = self.ready.pop_front()?;
        Some(self.line(at, &bytes))
    }

    fn line(&self, at: Timestamp, bytes: &[u8]) -> LogLine {
        let text = String::from_utf8_lossy(bytes).into_owned();
        LogLine { at, source: self.stream.source.clone(), stream: self.stream.name, text }
    }

    /// When the next complete line was printed; reads on for it.
    fn peek(&mut self) -> Result<Option<Timestamp>, Error> {
        loop {
            if let Some((at, _)) = self.ready.front() {
                return Ok(Some(*at));
            }
            if !self.read()? {
                return Ok(None);
            }
        }
    }

    /// Reads one piece; false at the end.
    fn read(&mut self) -> Result<bool, Error> {
        let dir = &self.stream.dir;
        let (mut reader, index) = self.open.take().unwrap_or_else(|| (Reader::open(dir), TimeIndex::open(dir)));
        if !std::mem::replace(&mut self.begun, true)
            && let Some(since) = self.since
        {
            let from = index.offset_at(since).map_err(Error::internal)?;
            // From the byte before: where that is a line's end, no line is cut.
            self.skipping = from > Offset::ZERO;
            self.position = Offset(from.0.saturating_sub(1));
        }
        let chunk = reader.read(self.position, CHUNK).map_err(Error::internal)?;
        let more = match chunk {
            Chunk::Data { offset, bytes } => {
                self.split(&index, offset, &bytes)?;
                self.position = offset.plus(bytes.len());
                true
            }
            Chunk::Gap { to, .. } => {
                self.partial.clear();
                self.skipping = true;
                self.position = to;
                true
            }
            Chunk::End => false,
        };
        self.open = Some((reader, index));
        Ok(more)
    }

    fn split(&mut self, index: &TimeIndex, offset: Offset, bytes: &[u8]) -> Result<(), Error> {
        let mut at = offset;
        for part in bytes.split_inclusive(|b| *b == b'\n') {
            if self.partial.is_empty() {
                let time = index.time_of(at).map_err(Error::internal)?.unwrap_or(self.stream.since);
                // The order within a stream is the bytes' own.
                self.latest = self.latest.max(time);
                self.partial_at = self.latest;
            }
            at = at.plus(part.len());
            let whole = part.ends_with(b"\n");
            if self.skipping {
                self.skipping = !whole;
                continue;
            }
            self.partial.extend_from_slice(if whole { &part[..part.len() - 1] } else { part });
            if whole || self.partial.len() >= MAX_LINE {
                self.ready.push_back((self.partial_at, std::mem::take(&mut self.partial)));
            }
        }
        Ok(())
    }

    /// Gives the file back; its place is kept.
    fn close(&mut self) {
        self.open = None;
    }

    fn rest(&mut self) -> Option<LogLine> {
        let rest = std::mem::take(&mut self.partial);
        (!rest.is_empty()).then(|| self.line(self.partial_at, &rest))
    }

    fn into_merged(self) -> Merged {
        let Stream { source, name, journal, goes_on, .. } = self.stream;
        Merged { source, name, journal, goes_on, position: self.position, partial: self.partial }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use journal::{Retention, Writer};
    use model::ExecId;
    use std::path::Path;

    fn stream(dir: &Path, source: LogSource, goes_on: bool) -> Stream {
        let journal = JournalName::Stdout(ExecId::new());
        Stream { source, name: "stdout", journal, dir: dir.to_owned(), since: Timestamp(0), goes_on }
    }

    fn texts(streams: Vec<Stream>, since: Option<Timestamp>) -> (Vec<String>, Vec<Merged>) {
        let mut found = Vec::new();
        let ends = merge(streams, since, |line| {
            found.push(line.unwrap().text);
            true
        });
        (found, ends.unwrap())
    }

    #[test]
    fn lines_come_in_the_order_of_time_and_the_last_without_an_end_waits() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let mut first = Writer::open(&a, Retention::default()).unwrap();
        let mut second = Writer::open(&b, Retention::default()).unwrap();
        first.append_at(b"a1\na2", Timestamp(10_000)).unwrap();
        second.append_at(b"b1\n", Timestamp(20_000)).unwrap();
        first.append_at(b"-rest\na3\npartial", Timestamp(30_000)).unwrap();
        second.append_at(b"b2\nend", Timestamp(40_000)).unwrap();
        let source = |n| LogSource::Exec(ExecId(uuid::Uuid::from_u128(n)));
        let (found, ends) = texts(vec![stream(&a, source(1), true), stream(&b, source(2), false)], None);
        assert_eq!(found, ["a1", "a2-rest", "b1", "a3", "b2", "end"]);
        assert_eq!(ends[0].partial, b"partial");
        assert_eq!(ends[0].position, Offset(21));
        let (found, _) = texts(vec![stream(&a, source(1), true), stream(&b, source(2), false)], Some(Timestamp(25_000)));
        assert_eq!(found, ["a3", "b2", "end"]);
    }

    #[test]
    fn a_line_without_an_end_is_given_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::open(dir.path(), Retention::default()).unwrap();
        writer.append(&vec![b'x'; 3 * MAX_LINE]).unwrap();
        let source = LogSource::Exec(ExecId::new());
        let (found, _) = texts(vec![stream(dir.path(), source, false)], None);
        assert!(found.len() >= 3 && found.iter().map(String::len).sum::<usize>() == 3 * MAX_LINE);
    }

    #[test]
    fn a_reader_that_leaves_ends_the_merge() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::open(dir.path(), Retention::default()).unwrap();
        writer.append(b"1\n2\n3\n").unwrap();
        let mut given = 0;
        let source = LogSource::Exec(ExecId::new());
        let ends = merge(vec![stream(dir.path(), source, false)], None, |_| {
            given += 1;
            given < 2
        });
        assert!(ends.is_none() && given == 2);
    }
}
