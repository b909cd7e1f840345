//! Standard output as a sink. The log of the process goes to standard error, so the two do not mix.

use std::io::{self, Write as _};

/// Standard output.
#[derive(Debug, Default)]
pub(crate) struct StdoutSink {
    /// The last write failed, so that the current line may have no end.
    has_open_line: bool,
}

impl StdoutSink {
    /// Writes whole lines.
    pub(super) fn write_lines(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.has_open_line {
            stdout.write_all(b"\n")?;
        }
        self.has_open_line = true;
        stdout.write_all(lines)?;
        stdout.flush()?;
        self.has_open_line = false;
        Ok(())
    }
}
