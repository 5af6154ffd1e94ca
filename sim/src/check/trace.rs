//! A checker that accepts everything and prints it, to debug a single seed.

use std::io::Write;

use racksum_proto::wire::{self, Flags, Header, Kind, NackEntries, OpenDecoder};

use super::{Checker, Machine, Sight, Violation};
use crate::engine::Picos;

/// Writes one line for each observation, up to a maximum number of lines.
#[derive(Debug)]
pub struct Trace<W> {
    out: W,
    lines: u64,
}

impl<W: Write> Trace<W> {
    /// Creates a trace that writes at most `lines` lines to `out`.
    pub const fn new(out: W, lines: u64) -> Self {
        Self { out, lines }
    }
}

impl<W: Write> Checker for Trace<W> {
    fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        let what = match sight {
            Sight::Driven { .. } | Sight::Foreign(_) => return Ok(()),
            Sight::Sent(datagram) => format!("sends {}", summary(datagram)),
            Sight::Received(datagram) => format!("receives {}", summary(datagram)),
            Sight::Ended(op, Ok(_)) => format!("has the result of op {}", op.0),
            Sight::Ended(_, Err(error)) => error.to_string(),
            Sight::Called(op) => format!("calls op {}", op.0),
            Sight::Refused(op) => format!("cannot call op {}", op.0),
            Sight::Event(event) => format!("{event:?}"),
        };
        if let Some(left) = self.lines.checked_sub(1) {
            let (micros, picos) = (at.0 / 1_000_000, at.0 % 1_000_000);
            let written = writeln!(self.out, "{micros:>9}.{picos:06} us, {machine}: {what}");
            // If the reader has closed the output, write no more lines.
            self.lines = if written.is_ok() { left } else { 0 };
        }
        Ok(())
    }
}

/// Formats a datagram as one line.
fn summary(datagram: &[u8]) -> String {
    let messages = wire::messages(datagram).map(|message| match message {
        Ok((header, body)) => describe(&header, body),
        Err(reject) => reject.name().to_owned(),
    });
    messages.collect::<Vec<_>>().join(" + ")
}

fn describe(header: &Header, body: &[u8]) -> String {
    let Header { kind, lane, shard, window, ack, mask, previous, fragment, .. } = *header;
    let mut text = format!(
        "{kind:?} {}.{}, lane {lane}, shard {shard}, ack {}.{}, {} bytes",
        window.op.0,
        window.index,
        ack.op.0,
        ack.index,
        body.len()
    );
    if matches!(kind, Kind::Data | Kind::Result) {
        text += &format!(", mask {mask:#x}, fragment {fragment}");
    }
    match kind {
        Kind::Result if previous == Header::NO_PREVIOUS => text += ", the first",
        Kind::Result => text += &format!(", after {previous}"),
        Kind::Nack => {
            for entry in NackEntries::decode(body).iter().flat_map(NackEntries::iter) {
                let (window, fragments) = (entry.window, entry.fragments);
                text += &format!(" [{}.{}: {fragments:#x}]", window.op.0, window.index);
            }
        }
        Kind::Open => {
            if let Ok(open) = OpenDecoder::new().decode(body, header.flags.has(Flags::RESUMED)) {
                let (windows, owed) = (open.windows, open.occupancy().count_ones());
                let after = open.after.map(|op| op.0);
                text += &format!(", {owed} of {windows} windows, after {after:?}");
            }
        }
        _ => {}
    }
    text
}
