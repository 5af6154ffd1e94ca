//! Slurm's `topology.conf` and `topology.yaml`, and variables that describe an allocation.
//!
//! Formats: topology.conf(5), topology.yaml(5) and the topology guide of Slurm,
//! <https://slurm.schedmd.com/topology.html>.
//!
//! **Direction**: a line names a switch and what is below it. The levels of a tree are `level0`
//! next to the hosts, `level1` above it and so on, as `scontrol show topology` numbers them; an
//! import lists them in the opposite order, widest first. Blocks give the level `block`, and each
//! further block size *n* the level `block`*n*.

mod allocation;
mod conf;
mod yaml;

pub use allocation::{AllocationError, UNTYPED, gpus, per_host};

use std::collections::BTreeMap;

use super::hostlist::{HostlistError, MOST_BYTES, MOST_NAMES, check_name, compress, expand};
use super::tree::{self, Switch};
use super::{Import, ImportError, ImportErrorKind, ImportedHost, MOST_LEVELS, Place};

/// The format of a topology file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `topology.conf`.
    Conf,
    /// `topology.yaml`, since Slurm 25.05.
    Yaml,
}

/// Returns the hosts of a topology file.
///
/// `name` chooses one of several topologies: by its name in `topology.yaml`, and by `tree` or
/// `block` in a `topology.conf` that has both. Without it, the default of the cluster counts, or
/// the only topology.
///
/// # Errors
/// If the file is malformed or its topology is no tree; the error names the line.
pub fn read(text: &str, format: Format, name: Option<&str>) -> Result<Import, ImportError> {
    let mut names = Names { left: MOST_NAMES };
    match format {
        Format::Conf => conf::read(text, name, &mut names),
        Format::Yaml => yaml::read(text, name, &mut names),
    }?
    .import()
}

/// A topology of a file.
enum Topology {
    Tree(Vec<Switch>),
    Block { blocks: Vec<Block>, sizes: Vec<(usize, u32)> },
    Flat,
}

/// Returns the topology of a name, or the only one.
fn chosen<T>(topologies: Vec<(String, T)>, name: Option<&str>) -> Result<T, ImportError> {
    let mut names: Vec<_> = topologies.iter().map(|(name, _)| name.clone()).collect();
    let name = match (name, names.as_mut_slice()) {
        (_, []) => return Err(ImportErrorKind::Empty.nowhere()),
        (Some(name), _) => name.to_owned(),
        (None, [only]) => std::mem::take(only),
        (None, _) => return Err(ImportErrorKind::Ambiguous(names).nowhere()),
    };
    let found = topologies.into_iter().find(|(other, _)| *other == name);
    found
        .map(|(_, found)| found)
        .ok_or_else(|| ImportErrorKind::NoTopology { name, names }.nowhere())
}

/// A block of hosts.
struct Block {
    name: String,
    line: usize,
    hosts: Vec<String>,
}

impl Topology {
    fn import(self) -> Result<Import, ImportError> {
        match self {
            Self::Flat => Ok(Import::default()),
            Self::Tree(switches) => tree::import(&switches, |height| format!("level{height}")),
            Self::Block { blocks, sizes } => import_blocks(&blocks, &sizes),
        }
    }
}

/// Reads names, and limits their number over a whole file.
struct Names {
    left: usize,
}

impl Names {
    /// Returns the name of a switch or block.
    fn one(&mut self, line: usize, name: &str) -> Result<String, ImportError> {
        let wrong = |error| ImportErrorKind::Hostlist(error).at(line);
        check_name(name).map_err(wrong)?;
        let left = self.left.checked_sub(1);
        self.left = left.ok_or_else(|| wrong(HostlistError::Many(name.into())))?;
        Ok(name.into())
    }

    fn list(&mut self, line: usize, text: Option<&str>) -> Result<Vec<String>, ImportError> {
        let Some(text) = text else { return Ok(vec![]) };
        expand(text, &mut self.left).map_err(|error| ImportErrorKind::from(error).at(line))
    }

    fn switch(
        &mut self,
        line: usize,
        name: &str,
        (children, hosts): (Option<&str>, Option<&str>),
    ) -> Result<Switch, ImportError> {
        let name = self.one(line, name)?;
        if children.is_some() && hosts.is_some() {
            return Err(ImportErrorKind::Mixed(name).at(line));
        }
        let (children, hosts) = (self.list(line, children)?, self.list(line, hosts)?);
        Ok(Switch { name, place: Place::Line(line), children, hosts })
    }

    fn block(
        &mut self,
        line: usize,
        name: &str,
        hosts: Option<&str>,
    ) -> Result<Block, ImportError> {
        Ok(Block { name: self.one(line, name)?, line, hosts: self.list(line, hosts)? })
    }
}

/// Returns the hosts of blocks. Slurm joins neighbours in the order of the file to blocks of the
/// greater sizes, and so does this function: the levels of these sizes are wider.
fn import_blocks(blocks: &[Block], sizes: &[(usize, u32)]) -> Result<Import, ImportError> {
    let factors = factors(sizes)?;
    if factors.len() >= MOST_LEVELS {
        return Err(ImportErrorKind::Deep(factors.len()).nowhere());
    }
    let wider = factors.iter().skip(1).rev().map(|(size, _)| format!("block{size}"));
    let levels: Vec<_> = wider.chain(["block".into()]).collect();
    check_unique(blocks)?;
    let names: Vec<_> = blocks.iter().map(|block| block.name.clone()).collect();
    let joined = |factor: usize| (factor, names.chunks(factor).map(joined).collect::<Vec<_>>());
    let joined: Vec<_> = factors.iter().skip(1).rev().map(|&(_, factor)| joined(factor)).collect();
    let mut hosts = vec![];
    for (index, block) in blocks.iter().enumerate() {
        let joined = joined.iter().map(|(factor, names)| names[index / factor].clone());
        let labels = levels.iter().cloned().zip(joined.chain([block.name.clone()])).collect();
        let place = |host: &String| ImportedHost {
            name: host.clone(),
            labels: BTreeMap::clone(&labels),
            ..ImportedHost::default()
        };
        hosts.extend(block.hosts.iter().map(place));
    }
    if hosts.is_empty() {
        return Err(ImportErrorKind::Empty.nowhere());
    }
    Ok(Import { levels, hosts, notes: vec![] })
}

/// Returns the name of neighbours that are joined. No block has the spaces of the short form.
fn joined(names: &[String]) -> String {
    let list = compress(names);
    match names {
        [first, .., last] if list.len() > MOST_BYTES => format!("{first} to {last}"),
        _ => list,
    }
}

/// Returns each size of blocks, and the number of the smallest blocks in one of it.
fn factors(sizes: &[(usize, u32)]) -> Result<Vec<(u32, usize)>, ImportError> {
    let base = sizes.first().map_or(1, |&(_, size)| size);
    let mut factors: Vec<(u32, usize)> = vec![];
    for &(line, size) in sizes {
        if size == 0 {
            return Err(
                ImportErrorKind::Syntax("a block size is 0; give 1 or more".into()).at(line)
            );
        }
        let previous = factors.last().map_or(0, |&(previous, _)| previous);
        let doubles = previous == 0
            || size > previous && size % previous == 0 && (size / previous).is_power_of_two();
        if !doubles {
            return Err(ImportErrorKind::BlockSize { previous, size }.at(line));
        }
        factors.push((size, usize::try_from(size / base).unwrap_or(usize::MAX)));
    }
    Ok(factors)
}

fn check_unique(blocks: &[Block]) -> Result<(), ImportError> {
    let mut lines = BTreeMap::new();
    let mut homes = BTreeMap::new();
    for block in blocks {
        if let Some(first) = lines.insert(&block.name, block.line) {
            let (name, first) = (block.name.clone(), Place::Line(first));
            return Err(ImportErrorKind::Duplicate { what: "block", name, first }.at(block.line));
        }
        for host in &block.hosts {
            if let Some(other) = homes.insert(host, block) {
                if std::ptr::eq(other, block) {
                    return Err(ImportErrorKind::Twice(host.clone()).at(block.line));
                }
                let kind = ImportErrorKind::TwoParents {
                    child: host.clone(),
                    parent: block.name.clone(),
                    other: other.name.clone(),
                    first: Place::Line(other.line),
                };
                return Err(kind.at(block.line));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
