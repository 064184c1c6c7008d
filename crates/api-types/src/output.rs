//! Output as it is streamed: one JSON object a line, bytes in base64 at their absolute offsets.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use model::{Offset, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bytes in a line that aren't base64.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'data_b64' of an output line is not base64")]
pub struct BadData;

/// A line of `GET …/output`. The end is told once everything before it has been, and only then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "stream", rename_all = "snake_case")]
pub enum OutputLine {
    Stdout {
        /// Where in the stream the data begins.
        #[schema(value_type = u64)]
        offset: Offset,
        data_b64: String,
    },
    Stderr {
        #[schema(value_type = u64)]
        offset: Offset,
        data_b64: String,
    },
    /// A terminal's output.
    Tty {
        #[schema(value_type = u64)]
        offset: Offset,
        data_b64: String,
    },
    /// These bytes aren't kept any more, or never were.
    Gap {
        /// `stdout`, `stderr` or `tty`.
        of: String,
        #[schema(value_type = u64)]
        from: Offset,
        #[schema(value_type = u64)]
        to: Offset,
    },
    Exit {
        /// `exited`, `killed`, `timed_out`, `lost`; of a terminal `ended`.
        state: String,
        exit_code: Option<i32>,
        #[serde(default)]
        signal: Option<i32>,
        #[serde(default)]
        reason: Option<String>,
    },
}

impl OutputLine {
    /// Bytes of an exec's standard output.
    pub fn stdout(offset: Offset, bytes: &[u8]) -> OutputLine {
        OutputLine::Stdout { offset, data_b64: STANDARD.encode(bytes) }
    }

    /// Bytes of an exec's standard error.
    pub fn stderr(offset: Offset, bytes: &[u8]) -> OutputLine {
        OutputLine::Stderr { offset, data_b64: STANDARD.encode(bytes) }
    }

    /// Bytes of a terminal.
    pub fn tty(offset: Offset, bytes: &[u8]) -> OutputLine {
        OutputLine::Tty { offset, data_b64: STANDARD.encode(bytes) }
    }

    /// The bytes of a `data_b64`.
    ///
    /// # Errors
    /// [`BadData`] where it isn't base64.
    pub fn decode(data_b64: &str) -> Result<Vec<u8>, BadData> {
        STANDARD.decode(data_b64).map_err(|_| BadData)
    }
}

/// A line of `GET …/logs`: one line of output of an exec, a terminal or a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// When it was read, to about a second.
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// `exec:ID` or `service:NAME`.
    pub source: String,
    /// `stdout` or `stderr`.
    pub stream: String,
    /// Without its line end; bytes that aren't UTF-8 are shown as U+FFFD.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_contract() {
        for (line, json) in [
            (OutputLine::stdout(Offset(7), b"hi\xff"), r#"{"stream":"stdout","offset":7,"data_b64":"aGn/"}"#),
            (
                OutputLine::Gap { of: "stdout".into(), from: Offset(1), to: Offset(9) },
                r#"{"stream":"gap","of":"stdout","from":1,"to":9}"#,
            ),
            (
                OutputLine::Exit { state: "lost".into(), exit_code: None, signal: None, reason: None },
                r#"{"stream":"exit","state":"lost","exit_code":null,"signal":null,"reason":null}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&line).unwrap(), json);
            assert_eq!(serde_json::from_str::<OutputLine>(json).unwrap(), line);
        }
        assert_eq!(OutputLine::decode("aGn/").unwrap(), b"hi\xff");
        assert_eq!(OutputLine::decode("%"), Err(BadData));
    }
}
