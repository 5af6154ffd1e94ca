//! A queue with strict priorities: smaller numbers first, first in first out among equals.

use std::collections::VecDeque;

/// A queue whose items have priorities.
///
/// Few priorities are in use at once, so the classes are a short sorted list.
#[derive(Debug)]
pub struct StrictPriority<T> {
    /// Classes in ascending order of priority, some of them empty.
    classes: Vec<Class<T>>,
    len: usize,
    /// The number of items that were ever added.
    added: u64,
    reordered: u64,
}

#[derive(Debug)]
struct Class<T> {
    priority: u32,
    /// Items with their numbers.
    items: VecDeque<(u64, T)>,
    /// The number of the item that was last taken.
    last: u64,
}

impl<T> Default for StrictPriority<T> {
    fn default() -> Self {
        Self { classes: vec![], len: 0, added: 0, reordered: 0 }
    }
}

impl<T> StrictPriority<T> {
    /// Returns whether nothing waits.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of items that wait.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of items that were taken before an earlier one of their priority. It is
    /// zero unless the queue has a bug.
    #[must_use]
    pub const fn reordered(&self) -> u64 {
        self.reordered
    }

    /// Adds an item behind those of the same or a smaller priority.
    pub fn push(&mut self, priority: u32, item: T) {
        let mut index = self.classes.partition_point(|class| class.priority < priority);
        if self.classes.get(index).is_none_or(|class| class.priority != priority) {
            // The memory of an empty class serves the new one.
            let unused = self.classes.iter().rposition(|class| class.items.is_empty());
            let items = unused.map(|unused| {
                index -= usize::from(unused < index);
                self.classes.remove(unused).items
            });
            let items = items.unwrap_or_default();
            self.classes.insert(index, Class { priority, items, last: 0 });
        }
        self.added += 1;
        self.classes[index].items.push_back((self.added, item));
        self.len += 1;
    }

    /// Takes the first item of the smallest priority.
    pub fn pop(&mut self) -> Option<T> {
        if self.len == 0 {
            return None;
        }
        self.len -= 1;
        let class = self.classes.iter_mut().find(|class| !class.items.is_empty())?;
        let (number, item) = class.items.pop_front()?;
        self.reordered += u64::from(number <= class.last);
        class.last = number;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn it_is_a_stable_sort_by_priority() {
        let mut random = Random::new(1);
        let mut queue = StrictPriority::default();
        let mut model: Vec<(u32, u64)> = vec![];
        for number in 0..100_000 {
            if random.once_in(2) {
                let priority = random.pick(&[0, 1, 2, 3, 4, 5]);
                queue.push(priority, number);
                let index = model.partition_point(|(other, _)| *other <= priority);
                model.insert(index, (priority, number));
            } else {
                let first = (!model.is_empty()).then(|| model.remove(0).1);
                assert_eq!(queue.pop(), first);
            }
            assert_eq!(queue.is_empty(), model.is_empty());
        }
    }
}
