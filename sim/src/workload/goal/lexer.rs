//! Splits a schedule into tokens.

use std::fmt;
use std::iter::Peekable;
use std::str::Chars;

use super::{GoalError, GoalErrorKind};

/// A token of a schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    /// A keyword or a label.
    Word(String),
    /// Decimal digits.
    Number(String),
    /// The wildcard `-1`.
    Any,
    Colon,
    Open,
    Close,
    /// The end of a line, or a semicolon.
    EndOfStatement,
    EndOfText,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => write!(f, "{word:?}"),
            Self::Number(digits) => f.write_str(digits),
            Self::Any => f.write_str("-1"),
            Self::Colon => f.write_str("`:`"),
            Self::Open => f.write_str("`{`"),
            Self::Close => f.write_str("`}`"),
            Self::EndOfStatement => f.write_str("the end of the statement"),
            Self::EndOfText => f.write_str("the end of the text"),
        }
    }
}

/// The tokens of a text.
pub(super) struct Lexer<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
    /// A token that was looked at but not taken, and its line.
    peeked: Option<(usize, Token)>,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { rest: text.chars().peekable(), line: 1, peeked: None }
    }

    /// Returns the next token without taking it.
    pub(super) fn peek(&mut self) -> Result<Token, GoalError> {
        if self.peeked.is_none() {
            self.peeked = Some(self.read()?);
        }
        Ok(self.peeked.clone().expect("read above").1)
    }

    /// Takes the next token and its line.
    pub(super) fn next_token(&mut self) -> Result<(usize, Token), GoalError> {
        match self.peeked.take() {
            Some(token) => Ok(token),
            None => self.read(),
        }
    }

    fn read(&mut self) -> Result<(usize, Token), GoalError> {
        loop {
            let line = self.line;
            let Some(next) = self.rest.next() else { return Ok((line, Token::EndOfText)) };
            let token = match next {
                ' ' | '\t' | '\r' => continue,
                '\n' => {
                    self.line += 1;
                    Token::EndOfStatement
                }
                ';' => Token::EndOfStatement,
                ':' => Token::Colon,
                '{' => Token::Open,
                '}' => Token::Close,
                '/' => {
                    self.comment(line)?;
                    continue;
                }
                '-' if self.run('-', |c| c.is_ascii_digit()) == "-1" => Token::Any,
                c if c.is_ascii_digit() => Token::Number(self.run(c, |c| c.is_ascii_digit())),
                c if c.is_ascii_alphabetic() => {
                    Token::Word(self.run(c, |c| c.is_ascii_alphanumeric() || c == '_'))
                }
                c => return Err(GoalErrorKind::Character(c).at(line)),
            };
            return Ok((line, token));
        }
    }

    /// Takes the characters that belong to the token that begins with `first`.
    fn run(&mut self, first: char, belongs: impl Fn(char) -> bool) -> String {
        let mut run = String::from(first);
        while let Some(next) = self.rest.next_if(|c| belongs(*c)) {
            run.push(next);
        }
        run
    }

    /// Skips a comment whose first slash was taken. A comment to the end of its line leaves the
    /// end there.
    fn comment(&mut self, line: usize) -> Result<(), GoalError> {
        match self.rest.next() {
            Some('/') => {
                while self.rest.next_if(|c| *c != '\n').is_some() {}
                Ok(())
            }
            Some('*') => loop {
                match self.rest.next() {
                    Some('*') if self.rest.next_if_eq(&'/').is_some() => return Ok(()),
                    Some('\n') => self.line += 1,
                    Some(_) => {}
                    None => return Err(GoalErrorKind::OpenComment.at(line)),
                }
            },
            _ => Err(GoalErrorKind::Character('/').at(line)),
        }
    }
}
