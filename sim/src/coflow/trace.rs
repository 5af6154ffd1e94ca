//! The public text formats of coflow traces.
//!
//! The first line has the number of ports and the number of coflows. Each further line is a
//! coflow, in one of two dialects; blank lines are skipped. A colon occurs only in the first
//! dialect, so the reader needs no hint.
//!
//! | dialect | line |
//! |---|---|
//! | Facebook benchmark | `id arrival_ms mappers m.. reducers r:MB..` |
//! | Sincronia | `id arrival_ms flows sources destinations (source destination MB)..` |
//!
//! Ports count from 0. A megabyte is 2^20 bytes and may have decimals, as in the simulators that
//! the formats come from. A reducer of the benchmark receives an equal part from each mapper; the
//! bytes that do not divide come from the first mappers.
//!
//! A line of Sincronia's dialect states numbers of sources and destinations. They need not agree
//! with the flows, because the authors moved flows away from their own port. The smaller one is
//! taken for the coflow's width, as in their simulator.

use crate::coflow::workload::{Coflow, Flow};
use crate::engine::Picos;

/// A trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The dialect that it is written in.
    pub dialect: Dialect,
    /// The number of ingress ports, and of egress ports.
    pub ports: usize,
    /// The coflows in the order of their lines, each with weight 1.
    pub coflows: Vec<Coflow>,
}

/// A way to write a coflow on a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Mappers and reducers, as in the Facebook trace of the coflow benchmark.
    Benchmark,
    /// Single flows, as in the traces of Sincronia's workload generator.
    Flows,
}

impl Trace {
    /// Reads a trace.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let dialect = if text.contains(':') { Dialect::Benchmark } else { Dialect::Flows };
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(index, line)| Fields { line: index + 1, words: line.split_whitespace() })
            .filter(|fields| fields.words.clone().next().is_some());
        let mut header = lines.next().ok_or(TraceError { line: 1, reason: Reason::Empty })?;
        let ports = header.index("the number of ports", MAX_PORTS)?;
        let stated = header.index("the number of coflows", usize::MAX)?;
        header.end()?;
        let mut coflows: Vec<Coflow> = Vec::new();
        let mut flows = 0;
        let mut last = header.line;
        for mut fields in lines {
            last = fields.line;
            let coflow = match dialect {
                Dialect::Benchmark => fields.benchmark_coflow(ports, MAX_FLOWS - flows)?,
                Dialect::Flows => fields.coflow_of_flows(ports, MAX_FLOWS - flows)?,
            };
            flows += coflow.flows.len();
            coflows.push(coflow);
        }
        if coflows.len() != stated {
            let reason = Reason::Count { stated, found: coflows.len() };
            return Err(TraceError { line: last, reason });
        }
        Ok(Self { dialect, ports, coflows })
    }
}

/// An error in a trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct TraceError {
    /// The line, from 1.
    pub line: usize,
    /// The reason.
    pub reason: Reason,
}

/// A reason why a trace cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// There is no first line.
    #[error("the trace is empty; begin it with the numbers of ports and coflows")]
    Empty,
    /// A line ends before a field.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field is not a number of the right kind.
    #[error("{field} is {word:?}, not {kind}")]
    NotANumber {
        /// The field.
        field: &'static str,
        /// The text that was found.
        word: String,
        /// The kind of number that is expected.
        kind: &'static str,
    },
    /// A reducer has no size.
    #[error("reducer {word:?} has no colon; write port:megabytes")]
    NoColon {
        /// The text that was found.
        word: String,
    },
    /// A number is too large.
    #[error("{field} is {value}; the most is {most}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// The number that was found.
        value: u64,
        /// The largest number that is accepted.
        most: usize,
    },
    /// A port is not one of those that the first line announces.
    #[error("{field} is {port}, but the first line announces {ports} ports, numbered from 0")]
    NoPort {
        /// The field.
        field: &'static str,
        /// The port.
        port: u64,
        /// The number of ports.
        ports: usize,
    },
    /// A coflow has reducers but no mappers.
    #[error("the coflow has reducers but no mappers, so their data has no source")]
    NoMappers,
    /// The trace has too many flows to hold.
    #[error("the trace has more than {MAX_FLOWS} flows; split it")]
    TooManyFlows,
    /// A line goes on after its last field.
    #[error("{word:?} follows the last field")]
    Trailing {
        /// The text that was found.
        word: String,
    },
    /// The number of coflows is not the stated one.
    #[error("the first line announces {stated} coflows, but {found} follow")]
    Count {
        /// The number on the first line.
        stated: usize,
        /// The number of lines after it.
        found: usize,
    },
}

/// The fields of a line that are not read yet.
struct Fields<'a> {
    line: usize,
    words: std::str::SplitWhitespace<'a>,
}

impl<'a> Fields<'a> {
    fn benchmark_coflow(&mut self, ports: usize, room: usize) -> Result<Coflow, TraceError> {
        let (id, release) = self.id_and_release()?;
        let mappers = self.index("the number of mappers", MAX_PORTS)?;
        let mappers = (0..mappers)
            .map(|_| self.port("a mapper's port", ports))
            .collect::<Result<Vec<usize>, _>>()?;
        let reducers = self.index("the number of reducers", MAX_PORTS)?;
        if reducers > 0 && mappers.is_empty() {
            return self.fails(Reason::NoMappers);
        }
        if mappers.len() * reducers > room {
            return self.fails(Reason::TooManyFlows);
        }
        let mut flows = Vec::new();
        for _ in 0..reducers {
            let word = self.word("a reducer")?;
            let Some((port, size)) = word.split_once(':') else {
                return self.fails(Reason::NoColon { word: word.into() });
            };
            let destination = self.port_in(port, "a reducer's port", ports)?;
            let bytes = self.bytes_in(size)?;
            let count = mappers.len() as u64;
            flows.extend(mappers.iter().zip(0..).map(|(&source, place)| Flow {
                source,
                destination,
                bytes: bytes / count + u64::from(place < bytes % count),
            }));
        }
        self.end()?;
        Ok(Coflow::new(id, release, flows))
    }

    fn coflow_of_flows(&mut self, ports: usize, room: usize) -> Result<Coflow, TraceError> {
        let (id, release) = self.id_and_release()?;
        let count = self.index("the number of flows", MAX_FLOWS)?;
        if count > room {
            return self.fails(Reason::TooManyFlows);
        }
        let sources = self.index("the number of sources", MAX_PORTS)?;
        let destinations = self.index("the number of destinations", MAX_PORTS)?;
        let mut flows = Vec::new();
        for _ in 0..count {
            let source = self.port("a flow's source", ports)?;
            let destination = self.port("a flow's destination", ports)?;
            let size = self.word("a flow's size")?;
            flows.push(Flow { source, destination, bytes: self.bytes_in(size)? });
        }
        self.end()?;
        Ok(Coflow { width: sources.min(destinations), ..Coflow::new(id, release, flows) })
    }

    fn id_and_release(&mut self) -> Result<(u64, Picos), TraceError> {
        let id = self.number("the coflow's id")?;
        let field = "the arrival in milliseconds";
        let arrival_ms = self.number(field)?;
        let Some(release) = arrival_ms.checked_mul(PICOS_PER_MILLI) else {
            let most = usize::try_from(u64::MAX / PICOS_PER_MILLI).unwrap_or(usize::MAX);
            return self.fails(Reason::TooLarge { field, value: arrival_ms, most });
        };
        Ok((id, Picos(release)))
    }

    /// Reads a size in megabytes; returns it in bytes, rounded to the nearest.
    fn bytes_in(&self, word: &str) -> Result<u64, TraceError> {
        let bytes = bytes_of_megabytes(word);
        let kind = "megabytes as a decimal number below 2^44 with at most 18 decimals";
        bytes.map_or_else(
            || self.fails(Reason::NotANumber { field: "a size", word: word.into(), kind }),
            Ok,
        )
    }

    fn port(&mut self, field: &'static str, ports: usize) -> Result<usize, TraceError> {
        let word = self.word(field)?;
        self.port_in(word, field, ports)
    }

    fn port_in(&self, word: &str, field: &'static str, ports: usize) -> Result<usize, TraceError> {
        let port = self.number_in(word, field)?;
        match usize::try_from(port) {
            Ok(index) if index < ports => Ok(index),
            _ => self.fails(Reason::NoPort { field, port, ports }),
        }
    }

    /// Reads a number of at most `most`.
    fn index(&mut self, field: &'static str, most: usize) -> Result<usize, TraceError> {
        let value = self.number(field)?;
        match usize::try_from(value) {
            Ok(index) if index <= most => Ok(index),
            _ => self.fails(Reason::TooLarge { field, value, most }),
        }
    }

    fn number(&mut self, field: &'static str) -> Result<u64, TraceError> {
        let word = self.word(field)?;
        self.number_in(word, field)
    }

    fn number_in(&self, word: &str, field: &'static str) -> Result<u64, TraceError> {
        let kind = "a whole number below 2^64";
        word.parse().or_else(|_| self.fails(Reason::NotANumber { field, word: word.into(), kind }))
    }

    fn word(&mut self, field: &'static str) -> Result<&'a str, TraceError> {
        self.words.next().map_or_else(|| self.fails(Reason::Missing { field }), Ok)
    }

    fn end(&mut self) -> Result<(), TraceError> {
        match self.words.next() {
            Some(word) => self.fails(Reason::Trailing { word: word.into() }),
            None => Ok(()),
        }
    }

    fn fails<T>(&self, reason: Reason) -> Result<T, TraceError> {
        Err(TraceError { line: self.line, reason })
    }
}

/// Converts megabytes in decimal notation to bytes, rounded to the nearest and half up.
fn bytes_of_megabytes(word: &str) -> Option<u64> {
    let (whole, decimals) = word.split_once('.').unwrap_or((word, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || decimals.len() > 18 || !digits(whole) || !digits(decimals) {
        return None;
    }
    let scale = 10u128.pow(u32::try_from(decimals.len()).ok()?);
    let part: u128 = if decimals.is_empty() { 0 } else { decimals.parse().ok()? };
    let bytes = u128::from(whole.parse::<u64>().ok()?) * BYTES_PER_MEGABYTE
        + (part * BYTES_PER_MEGABYTE + scale / 2) / scale;
    u64::try_from(bytes).ok()
}

/// The most ports on a side that a trace may have.
const MAX_PORTS: usize = 1 << 16;

/// The most flows that a trace may have. Mappers times reducers can be many more than the words.
const MAX_FLOWS: usize = 1 << 24;

const BYTES_PER_MEGABYTE: u128 = 1 << 20;
const PICOS_PER_MILLI: u64 = 1_000_000_000;
