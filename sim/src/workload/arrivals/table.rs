//! A CSV table with named columns, whose values are read with their line.

use std::num::{NonZeroU32, NonZeroU64};

use csv::{Position, ReaderBuilder, StringRecord, Trim};

use super::{Arrival, ArrivalError, ArrivalErrorKind, Options, Row, numbered};
use crate::engine::Picos;
use crate::workload::duration::{self, SECOND};

/// Reads the rows of a table into arrivals.
///
/// `columns` are the names that the format knows. `row` converts one row.
pub(super) fn read(
    text: &str,
    columns: &[&'static str],
    options: &Options,
    row: impl Fn(&Fields<'_>) -> Result<Row, ArrivalErrorKind>,
) -> Result<Vec<Arrival>, ArrivalError> {
    // `flexible` leaves it to us to report rows of a wrong length.
    let mut reader =
        ReaderBuilder::new().trim(Trim::All).flexible(true).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| csv_error(text, &error))?.clone();
    let columns = known(&header, columns).map_err(|kind| ArrivalError { line: 1, kind })?;
    let mut arrivals = Vec::new();
    let most = options.max_jobs.unwrap_or(usize::MAX);
    for record in reader.into_records().take(most) {
        let record = record.map_err(|error| csv_error(text, &error))?;
        let read = || {
            if record.len() != columns.len() {
                let (expected, found) = (columns.len(), record.len());
                return Err(ArrivalErrorKind::Fields { expected, found });
            }
            row(&Fields { columns: &columns, record: &record })?.arrival(options)
        };
        let error = |kind: ArrivalErrorKind| {
            let line = if kind.is_of_header() { 1 } else { line(text, record.position()) };
            ArrivalError { line, kind }
        };
        arrivals.push(read().map_err(error)?);
    }
    if arrivals.is_empty() {
        return Err(ArrivalError { line: 1, kind: ArrivalErrorKind::Empty });
    }
    Ok(numbered(arrivals, options))
}

/// Returns the names of the columns, if all are known and none is repeated.
fn known(
    header: &StringRecord,
    columns: &[&'static str],
) -> Result<Vec<&'static str>, ArrivalErrorKind> {
    let mut names = Vec::new();
    for name in header {
        let Some(&name) = columns.iter().find(|column| **column == name) else {
            return Err(ArrivalErrorKind::UnknownColumn(name.to_owned()));
        };
        if names.contains(&name) {
            return Err(ArrivalErrorKind::RepeatedColumn(name));
        }
        names.push(name);
    }
    if names.is_empty() { Err(ArrivalErrorKind::Empty) } else { Ok(names) }
}

fn csv_error(text: &str, error: &csv::Error) -> ArrivalError {
    let line = line(text, error.position());
    ArrivalError { line, kind: ArrivalErrorKind::Csv(error.to_string()) }
}

/// Returns the line of the record at or after a position. The reader's own line does not count the
/// blank lines in between, nor the line feed that follows a carriage return.
fn line(text: &str, position: Option<&Position>) -> usize {
    let start = position.and_then(|position| usize::try_from(position.byte()).ok()).unwrap_or(0);
    let bytes = text.as_bytes();
    let is_blank = |byte: &&u8| matches!(byte, b'\r' | b'\n');
    let blank = bytes.iter().skip(start).take_while(is_blank).count();
    bytes.iter().take(start + blank).filter(|byte| **byte == b'\n').count() + 1
}

/// The fields of one row.
pub(super) struct Fields<'a> {
    columns: &'a [&'static str],
    record: &'a StringRecord,
}

impl Fields<'_> {
    /// Returns a value, or none if there is no such column.
    fn find(&self, column: &str) -> Option<&str> {
        let index = self.columns.iter().position(|name| *name == column)?;
        self.record.get(index)
    }

    fn value(&self, column: &'static str) -> Result<&str, ArrivalErrorKind> {
        self.find(column).ok_or(ArrivalErrorKind::MissingColumn(column))
    }

    pub(super) fn text(&self, column: &'static str) -> Result<String, ArrivalErrorKind> {
        match self.value(column)? {
            "" => Err(wrong(column, "", "a name")),
            text => Ok(text.to_owned()),
        }
    }

    /// Returns a number of GPUs.
    pub(super) fn gpus(&self, column: &'static str) -> Result<NonZeroU32, ArrivalErrorKind> {
        let value = self.value(column)?;
        value.parse().map_err(|_| wrong(column, value, "a whole number of 1 or more"))
    }

    /// Returns a number of iterations, or none if there is no such column. A job trains at least
    /// one iteration.
    pub(super) fn iterations(
        &self,
        column: &'static str,
    ) -> Result<Option<NonZeroU64>, ArrivalErrorKind> {
        let Some(value) = self.find(column) else { return Ok(None) };
        let number = value.parse().map_err(|_| wrong(column, value, "a whole number"))?;
        Ok(Some(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN)))
    }

    /// Returns a number of seconds, whole or with decimals.
    pub(super) fn seconds(&self, column: &'static str) -> Result<Picos, ArrivalErrorKind> {
        let value = self.value(column)?;
        let picos = match (value.parse::<u64>(), value.parse::<f64>()) {
            (Ok(seconds), _) => duration::from_whole_units(seconds, SECOND),
            (_, Ok(seconds)) => duration::from_units(seconds, SECOND),
            _ => return Err(wrong(column, value, "a number of seconds")),
        };
        picos.map_err(|why| ArrivalErrorKind::Time { column, why })
    }

    /// Returns a number of seconds, or none if there is no such column.
    pub(super) fn optional_seconds(
        &self,
        column: &'static str,
    ) -> Result<Option<Picos>, ArrivalErrorKind> {
        self.find(column).map(|_| self.seconds(column)).transpose()
    }
}

fn wrong(column: &'static str, value: &str, expected: &'static str) -> ArrivalErrorKind {
    ArrivalErrorKind::Value { column, value: value.to_owned(), expected }
}
