//! Switches and the hosts below them, as levels of labels.
//!
//! The level of a switch is its height above the lowest switches, as in Slurm. Every host needs a
//! label for each level. If a branch skips a level, the switch below the gap fills it: its domain
//! then has one child, and the link between them carries the same bytes as the switch's own.

use std::collections::BTreeMap;

use super::{Import, ImportError, ImportErrorKind, ImportedHost, MOST_LEVELS, Note, Place};

/// A switch with the switches and hosts below it.
#[derive(Debug, Clone)]
pub(super) struct Switch {
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) children: Vec<String>,
    pub(super) hosts: Vec<String>,
}

/// Returns the hosts below switches, in the order of the switches. `name` names a level by its
/// height, which is 0 for the level next to the hosts.
pub(super) fn import(
    switches: &[Switch],
    name: impl Fn(usize) -> String,
) -> Result<Import, ImportError> {
    let tree = Tree::new(switches)?;
    let heights = tree.heights()?;
    let Some(top) = heights.iter().flatten().max().copied() else {
        return Err(ImportErrorKind::Empty.nowhere());
    };
    if top >= MOST_LEVELS {
        return Err(ImportErrorKind::Deep(top + 1).nowhere());
    }
    let mut hosts = vec![];
    for (index, switch) in switches.iter().enumerate() {
        let labels = tree.labels(index, &heights, top, &name);
        hosts.extend(switch.hosts.iter().map(|host| ImportedHost {
            name: host.clone(),
            labels: labels.clone(),
            ..ImportedHost::default()
        }));
    }
    let levels = (0..=top).rev().map(name).collect();
    Ok(Import { levels, hosts, notes: tree.notes(&heights, top) })
}

struct Tree<'a> {
    switches: &'a [Switch],
    parents: Vec<Option<usize>>,
}

impl<'a> Tree<'a> {
    fn new(switches: &'a [Switch]) -> Result<Self, ImportError> {
        let mut indices = BTreeMap::new();
        for (index, switch) in switches.iter().enumerate() {
            if let Some(first) = indices.insert(switch.name.as_str(), index) {
                let first = switches[first].place.clone();
                let name = switch.name.clone();
                return Err(switch.error(ImportErrorKind::Duplicate {
                    what: "switch",
                    name,
                    first,
                }));
            }
        }
        let mut parents: Vec<Option<usize>> = vec![None; switches.len()];
        let mut hosts: BTreeMap<&str, usize> = BTreeMap::new();
        for (index, switch) in switches.iter().enumerate() {
            for child in &switch.children {
                let Some(&at) = indices.get(child.as_str()) else {
                    let (parent, child) = (switch.name.clone(), child.clone());
                    return Err(switch.error(ImportErrorKind::Unknown { parent, child }));
                };
                if let Some(other) = parents[at].replace(index) {
                    return Err(switch.listed_again(child, &switches[other]));
                }
            }
            for host in &switch.hosts {
                if let Some(other) = hosts.insert(host, index) {
                    return Err(switch.listed_again(host, &switches[other]));
                }
            }
        }
        Ok(Self { switches, parents })
    }

    /// Returns the height of each switch above the lowest level, or `None` for switches without
    /// hosts below them.
    fn heights(&self) -> Result<Vec<Option<usize>>, ImportError> {
        let mut waiting: Vec<usize> =
            self.switches.iter().map(|switch| switch.children.len()).collect();
        let mut ready: Vec<usize> =
            (0..waiting.len()).filter(|&index| waiting[index] == 0).collect();
        let mut heights: Vec<Option<usize>> =
            self.switches.iter().map(|switch| (!switch.hosts.is_empty()).then_some(0)).collect();
        let mut done = 0;
        while let Some(index) = ready.pop() {
            done += 1;
            let Some(parent) = self.parents[index] else { continue };
            heights[parent] = heights[parent].max(heights[index].map(|height| height + 1));
            waiting[parent] -= 1;
            if waiting[parent] == 0 {
                ready.push(parent);
            }
        }
        if done == self.switches.len() { Ok(heights) } else { Err(self.cycle(&waiting)) }
    }

    /// Returns the error for switches that wait for each other's heights. A switch has at most one
    /// parent, so these are the switches in cycles, and no others.
    fn cycle(&self, waiting: &[usize]) -> ImportError {
        let first = waiting.iter().position(|&children| children > 0).unwrap_or(0);
        let up = |index: &usize| self.parents[*index].filter(|parent| *parent != first);
        let upwards: Vec<_> = std::iter::successors(Some(first), up).collect();
        let downwards = std::iter::once(first).chain(upwards.into_iter().rev());
        let names: Vec<_> = downwards.map(|index| self.switches[index].name.as_str()).collect();
        self.switches[first].error(ImportErrorKind::Cycle(names.join(" > ")))
    }

    /// Returns the labels of the hosts right below a switch.
    fn labels(
        &self,
        switch: usize,
        heights: &[Option<usize>],
        top: usize,
        name: impl Fn(usize) -> String,
    ) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        let mut at = switch;
        for height in 0..=top {
            if let Some(parent) = self.parents[at]
                && heights[parent] <= Some(height)
            {
                at = parent;
            }
            labels.insert(name(height), self.switches[at].name.clone());
        }
        labels
    }

    fn notes(&self, heights: &[Option<usize>], top: usize) -> Vec<Note> {
        let mut notes = vec![];
        let mut note = |found: Vec<&Switch>, text: &dyn Fn(&str, bool) -> String| {
            let Some((first, more)) = found.split_first() else { return };
            let names = match more.len() {
                0 => format!("switch {:?}", first.name),
                more => format!("switches {:?} and {more} more", first.name),
            };
            let text = text(&names, more.is_empty());
            notes.push(Note { place: Some(first.place.clone()), text });
        };
        let of = |is_found: &dyn Fn(usize) -> bool| -> Vec<&Switch> {
            let found = (0..self.switches.len()).filter(|&index| is_found(index));
            found.map(|index| &self.switches[index]).collect()
        };
        note(of(&|index| heights[index].is_none()), &|names, is_one| {
            format!("{names} {} no hosts below and {} left out", has(is_one), is(is_one))
        });
        let skips = |index: usize| {
            let Some(height) = heights[index] else { return false };
            let has_high_host = height > 0 && !self.switches[index].hosts.is_empty();
            let parent = self.parents[index].map_or(Some(top + 1), |parent| heights[parent]);
            has_high_host || parent.is_some_and(|parent| parent > height + 1)
        };
        note(of(&skips), &|names, is_one| {
            let counts = if is_one { "it counts" } else { "each counts" };
            format!(
                "{names} {} next to a level that others have; {counts} as one of its own \
                     there",
                is(is_one)
            )
        });
        let roots = of(&|index| self.parents[index].is_none() && heights[index].is_some());
        if roots.len() > 1 {
            note(roots, &|names, _| {
                format!(
                    "{names} have no switch above them; a plan may still span them, unless the \
                     job sets `scope` and `requires_scope`"
                )
            });
        }
        notes
    }
}

impl Switch {
    fn error(&self, kind: ImportErrorKind) -> ImportError {
        ImportError { place: Some(self.place.clone()), kind }
    }

    /// Returns the error for a child or host that `other`, or this switch itself, listed before.
    fn listed_again(&self, child: &str, other: &Self) -> ImportError {
        if std::ptr::eq(self, other) {
            return self.error(ImportErrorKind::Twice(child.into()));
        }
        self.error(ImportErrorKind::TwoParents {
            child: child.into(),
            parent: self.name.clone(),
            other: other.name.clone(),
            first: other.place.clone(),
        })
    }
}

const fn is(is_one: bool) -> &'static str {
    if is_one { "is" } else { "are" }
}

const fn has(is_one: bool) -> &'static str {
    if is_one { "has" } else { "have" }
}
