//! A reader of GOAL, the text format of schedules of LogGOPSim and ATLAHS.
//!
//! ```text
//! num_ranks 2
//! rank 0 {
//!   l1: calc 100 cpu 1
//!   l2: send 10b to 1 tag 5
//!   l2 requires l1
//! }
//! rank 1 { recv 10b from 0 tag 5; }
//! ```
//!
//! Source: the grammar of LogGOPSim's `txt2bin`. Statements end at the end of a line, at `;` or
//! before `}`. With `a requires b`, a starts after b has ended; with `a irequires b`, after b has
//! started. A label may be used before its line. `cpu` chooses the unit of an operation and `nic`
//! the network card of a message; both are 0 by default, as is `tag`.
//!
//! Not supported, and refused: receives from any source or with any tag (`-1`), and the binary
//! format.

mod lexer;

use std::collections::BTreeMap;

use racksum_proto::ids::Rank;

use self::lexer::{Lexer, Token};
use super::duration::{self, DurationError};
use super::graph::{
    Dependency, Event, Execution, Graph, GraphError, MOST_RANKS, Message, Node, NodeId, Unit, Work,
};
use crate::engine::Picos;

/// Reads a schedule, in which `calc` counts `unit`s of time. LogGOPSim takes them for nanoseconds.
///
/// # Errors
/// If the text is malformed or the schedule cannot run. The error names the line; errors in the
/// order of operations name operations, and these have their lines in their names.
pub fn read(text: &str, unit: Picos) -> Result<Execution, GoalError> {
    let mut parser = Parser { lexer: Lexer::new(text), line: 1, unit };
    let (line, ranks) = parser.num_ranks()?;
    let mut graphs = BTreeMap::new();
    while let Some(rank) = parser.block_head(ranks)? {
        let line = parser.line;
        let graph = Graph::new(rank, parser.block()?)?;
        if graphs.insert(rank, graph).is_some() {
            return Err(GoalErrorKind::RepeatedRank(rank.0).at(line));
        }
    }
    let first = (0..=u16::MAX).find(|rank| !graphs.contains_key(&Rank(*rank)));
    if let Some(missing) = first.filter(|missing| u32::from(*missing) < ranks) {
        return Err(GoalErrorKind::MissingRank { missing, ranks }.at(line));
    }
    Ok(Execution::new(Vec::new(), graphs.into_values().collect())?)
}

/// An error in a schedule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GoalError {
    /// A line is malformed.
    #[error("line {line}: {kind}")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// The reason.
        kind: GoalErrorKind,
    },
    /// The schedule cannot run.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// A reason why a line of a schedule is malformed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GoalErrorKind {
    /// Something else was expected.
    #[error("expected {expected}, but found {found}")]
    Expected {
        /// The expected token.
        expected: &'static str,
        /// The token that the line has.
        found: String,
    },
    /// No token begins with this character.
    #[error("unexpected character {0:?}")]
    Character(char),
    /// A comment has no end.
    #[error("this comment has no end; add */")]
    OpenComment,
    /// A number is too large.
    #[error("{number} is too large for {what}; the limit is {limit}")]
    TooLarge {
        /// The number.
        number: String,
        /// The thing that is numbered.
        what: &'static str,
        /// The largest number.
        limit: u64,
    },
    /// A time is too long.
    #[error(transparent)]
    Time(#[from] DurationError),
    /// There are no ranks, or too many.
    #[error("num_ranks is {0}; it must be 1 to {MOST_RANKS}")]
    NumRanks(u64),
    /// A block belongs to a rank that does not exist.
    #[error("rank {rank} does not exist; num_ranks is {ranks}")]
    UnknownRank {
        /// The rank.
        rank: u64,
        /// The number of ranks.
        ranks: u32,
    },
    /// A rank has two blocks.
    #[error("rank {0} has a second block; merge it with the first")]
    RepeatedRank(u16),
    /// A rank has no block.
    #[error("num_ranks is {ranks}, but rank {missing} has no block; add it, even if it is empty")]
    MissingRank {
        /// The first rank without a block.
        missing: u16,
        /// The number of ranks.
        ranks: u32,
    },
    /// Two operations have one label.
    #[error("label {label:?} was used in line {first}; labels must be unique within a rank")]
    RepeatedLabel {
        /// The label.
        label: String,
        /// The line of its first use.
        first: usize,
    },
    /// A dependency names a label that its rank does not have.
    #[error("the rank has no operation with label {0:?}")]
    UnknownLabel(String),
    /// An operation does not exist.
    #[error("operation {0:?} is not supported; the operations are calc, send and recv")]
    UnknownOperation(String),
    /// An operation has an unknown attribute, or one twice.
    #[error("unexpected attribute {0:?}; calc takes cpu, and send and recv take tag, cpu and nic")]
    Attribute(String),
    /// A receive does not name its source or its tag.
    #[error("any {0} (-1) is not supported; name one")]
    Any(&'static str),
}

impl GoalErrorKind {
    const fn at(self, line: usize) -> GoalError {
        GoalError::Line { line, kind: self }
    }
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    /// The line of the last token.
    line: usize,
    unit: Picos,
}

/// The operations of a rank, and the dependencies whose labels are not resolved yet.
#[derive(Default)]
struct Block {
    nodes: Vec<Node>,
    /// The index and the line of each label.
    labels: BTreeMap<String, (usize, usize)>,
    dependencies: Vec<(usize, String, Event, String)>,
}

/// The attributes of an operation.
#[derive(Default)]
struct Attributes {
    tag: Option<u32>,
    cpu: Option<u32>,
    nic: Option<u32>,
}

impl Parser<'_> {
    fn next(&mut self) -> Result<Token, GoalError> {
        let (line, token) = self.lexer.next_token()?;
        self.line = line;
        Ok(token)
    }

    /// Takes the next token that does not end a line.
    fn next_after_lines(&mut self) -> Result<Token, GoalError> {
        loop {
            match self.next()? {
                Token::EndOfStatement => {}
                token => return Ok(token),
            }
        }
    }

    fn unexpected(&self, expected: &'static str, found: &Token) -> GoalError {
        GoalErrorKind::Expected { expected, found: found.to_string() }.at(self.line)
    }

    fn expect(&mut self, token: &Token, expected: &'static str) -> Result<(), GoalError> {
        match self.next()? {
            found if found == *token => Ok(()),
            found => Err(self.unexpected(expected, &found)),
        }
    }

    fn word(&mut self, word: &str, expected: &'static str) -> Result<(), GoalError> {
        self.expect(&Token::Word(word.to_owned()), expected)
    }

    fn number(&mut self, what: &'static str, limit: u64) -> Result<u64, GoalError> {
        match self.next()? {
            Token::Number(digits) => {
                digits.parse().ok().filter(|number| *number <= limit).ok_or_else(|| {
                    GoalErrorKind::TooLarge { number: digits, what, limit }.at(self.line)
                })
            }
            Token::Any => Err(GoalErrorKind::Any(what).at(self.line)),
            found => Err(self.unexpected("a number", &found)),
        }
    }

    fn small(&mut self, what: &'static str) -> Result<u32, GoalError> {
        let number = self.number(what, u32::MAX.into())?;
        Ok(u32::try_from(number).expect("checked against the limit"))
    }

    /// Reads the number of ranks, and returns its line too.
    fn num_ranks(&mut self) -> Result<(usize, u32), GoalError> {
        let token = self.next_after_lines()?;
        if token != Token::Word("num_ranks".to_owned()) {
            return Err(self.unexpected("`num_ranks`", &token));
        }
        let ranks = self.number("the number of ranks", u64::MAX)?;
        match u32::try_from(ranks) {
            Ok(count) if (1..=MOST_RANKS as u64).contains(&ranks) => Ok((self.line, count)),
            _ => Err(GoalErrorKind::NumRanks(ranks).at(self.line)),
        }
    }

    /// Reads `rank N {`, or returns none at the end of the text.
    fn block_head(&mut self, ranks: u32) -> Result<Option<Rank>, GoalError> {
        match self.next_after_lines()? {
            Token::EndOfText => return Ok(None),
            Token::Word(word) if word == "rank" => {}
            found => return Err(self.unexpected("`rank` or the end of the text", &found)),
        }
        let number = self.number("a rank", u64::MAX)?;
        let rank = u16::try_from(number).ok().filter(|rank| u32::from(*rank) < ranks);
        let rank =
            rank.ok_or_else(|| GoalErrorKind::UnknownRank { rank: number, ranks }.at(self.line))?;
        self.expect(&Token::Open, "`{`")?;
        Ok(Some(Rank(rank)))
    }

    /// Reads a block up to its closing bracket.
    fn block(&mut self) -> Result<Vec<Node>, GoalError> {
        let mut block = Block::default();
        loop {
            match self.next_after_lines()? {
                Token::Close => break,
                Token::Word(word) => self.statement(word, &mut block)?,
                found => return Err(self.unexpected("an operation, a label or `}`", &found)),
            }
        }
        block.resolved()
    }

    fn statement(&mut self, word: String, block: &mut Block) -> Result<(), GoalError> {
        let line = self.line;
        if matches!(word.as_str(), "calc" | "send" | "recv") {
            return self.operation(&word, None, line, block);
        }
        let event = match self.next()? {
            Token::Colon => {
                return match self.next()? {
                    Token::Word(operation) => self.operation(&operation, Some(word), line, block),
                    found => Err(self.unexpected("an operation", &found)),
                };
            }
            Token::Word(kind) if kind == "requires" => Event::Ended,
            Token::Word(kind) if kind == "irequires" => Event::Started,
            // Without a colon or a dependency, the word can only be meant as an operation.
            Token::Number(_) => return Err(GoalErrorKind::UnknownOperation(word).at(line)),
            found => return Err(self.unexpected("`:`, `requires` or `irequires`", &found)),
        };
        match self.next()? {
            Token::Word(on) => block.dependencies.push((line, word, event, on)),
            found => return Err(self.unexpected("a label", &found)),
        }
        self.end_of_statement("the end of the line")
    }

    fn operation(
        &mut self,
        operation: &str,
        label: Option<String>,
        line: usize,
        block: &mut Block,
    ) -> Result<(), GoalError> {
        let (work, attributes) = match operation {
            "calc" => {
                let time = self.number("a time", u64::MAX)?;
                let time = duration::from_whole_units(time, self.unit)
                    .map_err(|why| GoalErrorKind::Time(why).at(self.line))?;
                (Work::Compute(time), self.attributes(&["cpu"])?)
            }
            "send" => {
                let (message, attributes) = self.message("to", "`to`", "destination")?;
                (Work::Send(message), attributes)
            }
            "recv" => {
                let (message, attributes) = self.message("from", "`from`", "source")?;
                (Work::Recv(message), attributes)
            }
            _ => return Err(GoalErrorKind::UnknownOperation(operation.to_owned()).at(line)),
        };
        block.push(operation, work, Unit(attributes.cpu.unwrap_or(0)), label, line)
    }

    fn message(
        &mut self,
        preposition: &str,
        expected: &'static str,
        peer: &'static str,
    ) -> Result<(Message, Attributes), GoalError> {
        let bytes = self.number("a size", u64::MAX)?;
        self.word("b", "`b` after the number of bytes")?;
        self.word(preposition, expected)?;
        let peer = self.number(peer, u16::MAX.into())?;
        let peer = Rank(u16::try_from(peer).expect("checked against the limit"));
        let attributes = self.attributes(&["tag", "cpu", "nic"])?;
        let tag = attributes.tag.unwrap_or(0);
        Ok((Message { peer, bytes, tag, nic: attributes.nic.unwrap_or(0) }, attributes))
    }

    /// Reads attributes up to the end of the statement.
    fn attributes(&mut self, allowed: &[&str]) -> Result<Attributes, GoalError> {
        let mut attributes = Attributes::default();
        loop {
            match self.lexer.peek()? {
                Token::Word(name) => {
                    self.next()?;
                    let (slot, what) = match name.as_str() {
                        "tag" => (&mut attributes.tag, "tag"),
                        "cpu" => (&mut attributes.cpu, "cpu"),
                        "nic" => (&mut attributes.nic, "nic"),
                        _ => return Err(GoalErrorKind::Attribute(name).at(self.line)),
                    };
                    if slot.is_some() || !allowed.contains(&what) {
                        return Err(GoalErrorKind::Attribute(name).at(self.line));
                    }
                    *slot = Some(self.small(what)?);
                }
                _ => {
                    self.end_of_statement("an attribute or the end of the line")?;
                    return Ok(attributes);
                }
            }
        }
    }

    fn end_of_statement(&mut self, expected: &'static str) -> Result<(), GoalError> {
        // The bracket stays, since it ends the block too.
        if self.lexer.peek()? == Token::Close {
            return Ok(());
        }
        self.expect(&Token::EndOfStatement, expected)
    }
}

impl Block {
    fn push(
        &mut self,
        operation: &str,
        work: Work,
        unit: Unit,
        label: Option<String>,
        line: usize,
    ) -> Result<(), GoalError> {
        let index = self.nodes.len();
        let name = format!("{} (line {line})", label.as_deref().unwrap_or(operation));
        if let Some(label) = label {
            if let Some(&(_, first)) = self.labels.get(&label) {
                return Err(GoalErrorKind::RepeatedLabel { label, first }.at(line));
            }
            self.labels.insert(label, (index, line));
        }
        let id = NodeId(index as u64);
        self.nodes.push(Node { id, name, unit, work, after: Vec::new() });
        Ok(())
    }

    /// Returns the operations with their dependencies.
    fn resolved(mut self) -> Result<Vec<Node>, GoalError> {
        for (line, label, event, on) in self.dependencies {
            let index = |label: String| match self.labels.get(&label) {
                Some((index, _)) => Ok(*index),
                None => Err(GoalErrorKind::UnknownLabel(label).at(line)),
            };
            let (node, on) = (index(label)?, self.nodes[index(on)?].id);
            self.nodes[node].after.push(Dependency { node: on, event });
        }
        Ok(self.nodes)
    }
}

#[cfg(test)]
mod tests;
