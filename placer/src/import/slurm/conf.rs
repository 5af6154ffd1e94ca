//! `topology.conf`: lines of `Key=Value` pairs.

use super::super::{ImportError, ImportErrorKind};
use super::{Block, Names, Switch, Topology, chosen};

/// Returns the topology of a file, or the one of `name`: `tree` or `block`.
pub(super) fn read(
    text: &str,
    name: Option<&str>,
    names: &mut Names,
) -> Result<Topology, ImportError> {
    let mut file = File::default();
    for (line, text) in lines(text) {
        let pairs = pairs(&text).map_err(|kind| kind.at(line))?;
        if !pairs.is_empty() {
            file.take(line, &pairs, names)?;
        }
    }
    let File { switches, blocks, sizes } = file;
    let mut topologies = vec![];
    if !switches.is_empty() {
        topologies.push(("tree".to_owned(), Topology::Tree(switches)));
    }
    if !blocks.is_empty() {
        topologies.push(("block".to_owned(), Topology::Block { blocks, sizes }));
    }
    chosen(topologies, name)
}

/// The lines so far.
#[derive(Default)]
struct File {
    switches: Vec<Switch>,
    blocks: Vec<Block>,
    /// The sizes of blocks, with the line that lists them.
    sizes: Vec<(usize, u32)>,
}

impl File {
    fn take(
        &mut self,
        line: usize,
        pairs: &[(&str, &str)],
        names: &mut Names,
    ) -> Result<(), ImportError> {
        let wrong = |why: String| ImportErrorKind::Syntax(why).at(line);
        let mut fields = Fields::default();
        for &(key, value) in pairs {
            let Some(field) = fields.of(key) else {
                return Err(wrong(format!(
                    "unknown key {key:?}; racksum reads SwitchName, Switches, Nodes and LinkSpeed \
                     of topology/tree, and BlockName, Nodes and BlockSizes of topology/block"
                )));
            };
            if field.replace(value).is_some() {
                return Err(wrong(format!("{key} is given twice; give it once")));
            }
        }
        match fields {
            // Slurm ignores LinkSpeed, whose unit is arbitrary.
            Fields { switch: Some(name), block: None, sizes: None, children, hosts, .. } => {
                self.switches.push(names.switch(line, name, (children, hosts))?);
            }
            Fields { switch: None, block, sizes, children: None, hosts, speed: None }
                if block.is_some() || sizes.is_some() && hosts.is_none() =>
            {
                for size in sizes.iter().flat_map(|sizes| sizes.split(',')) {
                    let size = size.trim().parse().map_err(|_| {
                        wrong(format!("{size:?} is not a block size; give whole numbers"))
                    });
                    self.sizes.push((line, size?));
                }
                if let Some(name) = block {
                    self.blocks.push(names.block(line, name, hosts)?);
                }
            }
            _ => {
                return Err(wrong(
                    "the line defines neither a switch nor a block; begin it with SwitchName, \
                     BlockName or BlockSizes, and keep keys of trees and blocks apart"
                        .into(),
                ));
            }
        }
        Ok(())
    }
}

/// The values of a line.
#[derive(Default)]
struct Fields<'a> {
    switch: Option<&'a str>,
    children: Option<&'a str>,
    hosts: Option<&'a str>,
    speed: Option<&'a str>,
    block: Option<&'a str>,
    sizes: Option<&'a str>,
}

impl<'a> Fields<'a> {
    fn of(&mut self, key: &str) -> Option<&mut Option<&'a str>> {
        Some(match key.to_ascii_lowercase().as_str() {
            "switchname" => &mut self.switch,
            "switches" => &mut self.children,
            "nodes" => &mut self.hosts,
            "linkspeed" => &mut self.speed,
            "blockname" => &mut self.block,
            "blocksizes" => &mut self.sizes,
            _ => return None,
        })
    }
}

/// Returns the lines without comments, and the number of each. A backslash at the end of a line
/// continues it; the number is then that of the first.
fn lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = vec![];
    let mut is_continued = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.split_once('#').map_or(line, |(line, _)| line).trim_end();
        let (line, continues) = line.strip_suffix('\\').map_or((line, false), |line| (line, true));
        match lines.last_mut().filter(|_| is_continued) {
            Some((_, before)) => before.push_str(line),
            None => lines.push((index + 1, line.to_owned())),
        }
        is_continued = continues;
    }
    lines
}

/// Splits a line into keys and values. A value may be in double quotes.
fn pairs(line: &str) -> Result<Vec<(&str, &str)>, ImportErrorKind> {
    let mut pairs = vec![];
    let mut rest = line.trim();
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (key, tail) = rest.split_at(end.unwrap_or(rest.len()));
        if key.eq_ignore_ascii_case("include") {
            let why = "Include is not supported; copy the other file's lines into this file";
            return Err(ImportErrorKind::Syntax(why.into()));
        }
        let value = tail.trim_start().strip_prefix('=').map(str::trim_start);
        let Some(value) = value.filter(|_| !key.is_empty()) else {
            let found: String = rest.chars().take(20).collect();
            return Err(ImportErrorKind::Syntax(format!("expected Key=Value, found {found:?}")));
        };
        let (value, tail) = match value.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').ok_or_else(|| {
                ImportErrorKind::Syntax(format!(
                    "the value of {key} has an opening quote and no closing one"
                ))
            })?,
            None => value.split_at(value.find(char::is_whitespace).unwrap_or(value.len())),
        };
        pairs.push((key, value));
        rest = tail.trim_start();
    }
    Ok(pairs)
}
