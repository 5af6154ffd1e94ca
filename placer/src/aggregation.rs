//! The choice of the vertices of a tree that aggregate, if only some of them can.
//!
//! Messages start at the vertices and travel to the destination above the root. A vertex that
//! aggregates sends one message for all that it receives; any other vertex forwards each. Both
//! searches are exact:
//!
//! - [`least_utilization`] minimises the time that all links are busy together (SOAR, arXiv
//!   2110.14224).
//! - [`least_congestion`] minimises the time that the busiest link is busy (SMC, INFOCOM 2022).

/// A vertex of an aggregation tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Vertex {
    /// The parent's index, which is smaller than the vertex's own; the root's is ignored.
    pub parent: usize,
    /// The messages that start at this vertex.
    pub messages: u32,
    /// The time that the link to the parent, or from the root to the destination, takes for one
    /// message: a finite number, not negative.
    pub time_per_message: f64,
    /// Whether the vertex can aggregate.
    pub can_aggregate: bool,
}

/// Vertices that aggregate, and the value that they reach.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The vertices that aggregate, in ascending order.
    pub aggregators: Vec<usize>,
    /// The time that is minimised.
    pub time: f64,
}

/// Returns at most `most` aggregating vertices for which all links together are busy for the
/// shortest time.
///
/// The first vertex is the root, and each vertex follows its parent. The search takes O(*n h k²*)
/// time for *n* vertices, height *h* and *k* aggregators.
///
/// # Panics
/// If a vertex does not follow its parent.
///
/// ```
/// use racksum_placer::aggregation::{Vertex, least_utilization};
///
/// // Two leaves with two and six messages under a root.
/// let vertex = |parent, messages| Vertex {
///     parent,
///     messages,
///     time_per_message: 1.0,
///     can_aggregate: true,
/// };
/// let tree = [vertex(0, 0), vertex(0, 2), vertex(0, 6)];
/// assert_eq!(least_utilization(&tree, 0).time, 16.0);
/// let choice = least_utilization(&tree, 1);
/// assert_eq!((choice.aggregators, choice.time), (vec![2], 6.0));
/// ```
#[must_use]
pub fn least_utilization(tree: &[Vertex], most: usize) -> Choice {
    if tree.is_empty() {
        return Choice { aggregators: vec![], time: 0.0 };
    }
    Utilization::new(tree, most.min(tree.len())).choose()
}

/// Returns at most `most` aggregating vertices for which the busiest link is busy for the shortest
/// time.
///
/// The vertices are in the order of [`least_utilization`]. The search takes O(*n k²* log *m*) time
/// for *n* vertices, *k* aggregators and *m* messages: it bisects the time, which is at most *m*
/// times the result, down to the precision of the numbers.
///
/// # Panics
/// If a vertex does not follow its parent.
#[must_use]
pub fn least_congestion(tree: &[Vertex], most: usize) -> Choice {
    if tree.is_empty() {
        return Choice { aggregators: vec![], time: 0.0 };
    }
    let time = busiest(tree, &[]);
    let mut best = Choice { aggregators: vec![], time };
    let mut too_short = 0.0;
    // Each success lowers the upper end to the time of a choice, so the result is exact.
    while best.time - too_short > best.time * PRECISION {
        let middle = f64::midpoint(too_short, best.time);
        match Congestion::new(tree, most.min(tree.len()), middle).aggregators() {
            Some(aggregators) => {
                let time = busiest(tree, &aggregators);
                best = Choice { aggregators, time };
            }
            None => too_short = middle,
        }
    }
    best
}

/// Returns the messages that each vertex sends.
fn sent(tree: &[Vertex], aggregators: &[usize]) -> Vec<u32> {
    let mut sent: Vec<u32> = tree.iter().map(|vertex| vertex.messages).collect();
    for vertex in (0..tree.len()).rev() {
        if aggregators.binary_search(&vertex).is_ok() {
            sent[vertex] = sent[vertex].min(1);
        }
        if vertex > 0 {
            let parent = tree[vertex].parent;
            sent[parent] = sent[parent].saturating_add(sent[vertex]);
        }
    }
    sent
}

/// Returns the time for which the busiest link is busy.
fn busiest(tree: &[Vertex], aggregators: &[usize]) -> f64 {
    let sent = sent(tree, aggregators);
    let times =
        tree.iter().zip(sent).map(|(vertex, sent)| f64::from(sent) * vertex.time_per_message);
    times.fold(0.0, f64::max)
}

/// The children of each vertex.
fn children(tree: &[Vertex]) -> Vec<Vec<usize>> {
    let mut children = vec![vec![]; tree.len()];
    for (vertex, Vertex { parent, .. }) in tree.iter().enumerate().skip(1) {
        assert!(*parent < vertex, "a vertex follows its parent");
        children[*parent].push(vertex);
    }
    children
}

/// Returns, for each number of aggregators, the least sum of one entry of each table. Entry *i* of
/// a table is the cost with *i* aggregators.
fn least_sum(one: &[f64], other: &[f64]) -> Vec<f64> {
    let mut sums = vec![f64::INFINITY; one.len()];
    for (first, cost) in one.iter().enumerate() {
        for (sum, more) in sums[first..].iter_mut().zip(other) {
            *sum = sum.min(cost + more);
        }
    }
    sums
}

/// Divides `aggregators` among children such that their costs add up to the least sum.
fn divide(tables: &[&[f64]], aggregators: usize) -> Vec<usize> {
    let mut sums = vec![vec![0.0; aggregators + 1]];
    for table in tables {
        let sum = least_sum(&sums[sums.len() - 1], &table[..=aggregators]);
        sums.push(sum);
    }
    let mut left = aggregators;
    let mut parts = vec![0; tables.len()];
    for (child, table) in tables.iter().enumerate().rev() {
        let cost = |part: &usize| sums[child][left - part] + table[*part];
        let part = (0..=left).min_by(|one, other| cost(one).total_cmp(&cost(other)));
        parts[child] = part.expect("not empty");
        left -= parts[child];
    }
    parts
}

/// For each vertex, each distance to the next aggregating ancestor, and each number of aggregators
/// in the subtree: the least time that the messages of the subtree keep links busy up to there.
struct Utilization<'a> {
    tree: &'a [Vertex],
    children: Vec<Vec<usize>>,
    /// Per vertex and number of links, the time that these links above it take for one message.
    /// The last entry reaches the destination.
    climbs: Vec<Vec<f64>>,
    /// Per vertex and number of links less one, the costs by number of aggregators.
    costs: Vec<Vec<Vec<f64>>>,
    /// Per vertex, the messages that it sends if it aggregates: one, or none if it receives none.
    aggregated: Vec<u32>,
    most: usize,
}

impl<'a> Utilization<'a> {
    fn new(tree: &'a [Vertex], most: usize) -> Self {
        let mut climbs: Vec<Vec<f64>> = Vec::with_capacity(tree.len());
        for (index, vertex) in tree.iter().enumerate() {
            let above: &[f64] = if index == 0 { &[] } else { &climbs[vertex.parent] };
            let above = above.iter().map(|time| time + vertex.time_per_message);
            climbs.push(std::iter::once(vertex.time_per_message).chain(above).collect());
        }
        let costs = vec![vec![]; tree.len()];
        let aggregated = sent(tree, &[]).into_iter().map(|sent| sent.min(1)).collect();
        let children = children(tree);
        let mut search = Self { tree, children, climbs, costs, aggregated, most };
        for vertex in (0..tree.len()).rev() {
            let links = 0..search.climbs[vertex].len();
            search.costs[vertex] = links.map(|links| search.costs_of(vertex, links)).collect();
        }
        search
    }

    /// Returns the costs of a vertex whose messages travel `links` links further than its own one.
    fn costs_of(&self, vertex: usize, links: usize) -> Vec<f64> {
        let mut costs = self.forwarding(vertex, links);
        for (cost, aggregating) in costs.iter_mut().skip(1).zip(self.aggregating(vertex, links)) {
            *cost = cost.min(aggregating);
        }
        costs
    }

    /// Returns the costs if the vertex forwards each message.
    fn forwarding(&self, vertex: usize, links: usize) -> Vec<f64> {
        let own = f64::from(self.tree[vertex].messages) * self.climbs[vertex][links];
        let tables = self.children[vertex].iter().map(|child| &self.costs[*child][links + 1]);
        tables.fold(vec![own; self.most + 1], |sums, table| least_sum(&sums, table))
    }

    /// Returns the costs if the vertex aggregates, without counting itself among the aggregators.
    fn aggregating(&self, vertex: usize, links: usize) -> Vec<f64> {
        if !self.tree[vertex].can_aggregate {
            return vec![];
        }
        let own = f64::from(self.aggregated[vertex]) * self.climbs[vertex][links];
        let tables = self.children[vertex].iter().map(|child| &self.costs[*child][0]);
        tables.fold(vec![own; self.most + 1], |sums, table| least_sum(&sums, table))
    }

    fn choose(&self) -> Choice {
        let mut aggregators = vec![];
        let mut pending = vec![(0, 0, self.most)];
        while let Some((vertex, links, count)) = pending.pop() {
            let least = self.costs[vertex][links][count];
            let forwards = self.forwarding(vertex, links)[count] <= least;
            let (next, left) = if forwards { (links + 1, count) } else { (0, count - 1) };
            if !forwards {
                aggregators.push(vertex);
            }
            let children = &self.children[vertex];
            let tables: Vec<_> = children.iter().map(|child| &*self.costs[*child][next]).collect();
            let parts = divide(&tables, left);
            pending.extend(children.iter().zip(parts).map(|(child, part)| (*child, next, part)));
        }
        aggregators.sort_unstable();
        Choice { aggregators, time: self.costs[0][0][self.most] }
    }
}

/// For each vertex and each number of aggregators in its subtree: the least number of messages that
/// it sends, if no link may be busy for longer than a given time.
struct Congestion<'a> {
    tree: &'a [Vertex],
    children: Vec<Vec<usize>>,
    sent: Vec<Vec<f64>>,
    most: usize,
    time: f64,
}

impl<'a> Congestion<'a> {
    fn new(tree: &'a [Vertex], most: usize, time: f64) -> Self {
        let sent = vec![vec![]; tree.len()];
        let mut search = Self { tree, children: children(tree), sent, most, time };
        for vertex in (0..tree.len()).rev() {
            let forwarded = search.forwarded(vertex);
            let carried = |messages: f64| {
                let is_in_time = messages * tree[vertex].time_per_message <= time;
                if is_in_time { messages } else { f64::INFINITY }
            };
            // Infinitely many messages mean that a link below is too slow; aggregation here does
            // not help.
            let aggregated = |messages: f64| {
                if messages.is_finite() { carried(messages.min(1.0)) } else { messages }
            };
            let mut sent: Vec<_> = forwarded.iter().map(|messages| carried(*messages)).collect();
            if tree[vertex].can_aggregate {
                for (messages, more) in sent.iter_mut().skip(1).zip(forwarded) {
                    *messages = messages.min(aggregated(more));
                }
            }
            search.sent[vertex] = sent;
        }
        search
    }

    /// Returns the messages that reach a vertex, its own included.
    fn forwarded(&self, vertex: usize) -> Vec<f64> {
        let own = f64::from(self.tree[vertex].messages);
        let tables = self.children[vertex].iter().map(|child| &self.sent[*child]);
        tables.fold(vec![own; self.most + 1], |sums, table| least_sum(&sums, table))
    }

    /// Returns the vertices that aggregate, if the time suffices.
    fn aggregators(&self) -> Option<Vec<usize>> {
        let mut aggregators = vec![];
        let mut pending = vec![(0, self.most)];
        while let Some((vertex, count)) = pending.pop() {
            let sent = self.sent[vertex][count];
            if sent.is_infinite() {
                return None;
            }
            let forwarded = self.forwarded(vertex)[count];
            let forwards =
                forwarded <= sent && forwarded * self.tree[vertex].time_per_message <= self.time;
            if !forwards {
                aggregators.push(vertex);
            }
            let children = &self.children[vertex];
            let tables: Vec<_> = children.iter().map(|child| &*self.sent[*child]).collect();
            let parts = divide(&tables, count - usize::from(!forwards));
            pending.extend(children.iter().copied().zip(parts));
        }
        aggregators.sort_unstable();
        Some(aggregators)
    }
}

/// The least relative difference of two times that the search tells apart.
const PRECISION: f64 = 1e-12;

#[cfg(test)]
mod tests {
    use proptest::bool::weighted;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    use super::*;

    /// The tree of the SOAR paper: seven switches in a complete binary tree under the destination.
    fn paper() -> Vec<Vertex> {
        let messages = [0, 0, 0, 2, 6, 5, 4];
        let vertex = |(index, messages): (usize, u32)| Vertex {
            parent: index.saturating_sub(1) / 2,
            messages,
            time_per_message: 1.0,
            can_aggregate: true,
        };
        (0..).zip(messages).map(vertex).collect()
    }

    #[test]
    fn the_tree_of_the_paper_has_its_utilization() {
        let times = (0..5).map(|most| least_utilization(&paper(), most).time);
        assert_eq!(times.collect::<Vec<_>>(), [51.0, 35.0, 20.0, 15.0, 11.0]);
    }

    #[test]
    fn the_tree_of_the_paper_has_its_congestion() {
        let times = (0..5).map(|most| least_congestion(&paper(), most).time);
        assert_eq!(times.collect::<Vec<_>>(), [17.0, 9.0, 5.0, 4.0, 3.0]);
    }

    fn utilization(tree: &[Vertex], aggregators: &[usize]) -> f64 {
        let sent = sent(tree, aggregators);
        tree.iter().zip(sent).map(|(vertex, sent)| f64::from(sent) * vertex.time_per_message).sum()
    }

    fn trees() -> impl Strategy<Value = Vec<Vertex>> {
        let time = select(vec![1.0, 0.5, 0.1, 3.0]);
        let vertex = (any::<Index>(), 0..6u32, time, weighted(0.8));
        vec(vertex, 1..=9).prop_map(|vertices| {
            let vertex = |(index, (parent, messages, time_per_message, can_aggregate))| {
                let parent: Index = parent;
                let parent = if index == 0 { 0 } else { parent.index(index) };
                Vertex { parent, messages, time_per_message, can_aggregate }
            };
            vertices.into_iter().enumerate().map(vertex).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn both_searches_equal_brute_force(tree in trees(), most in 0..4usize) {
            let (mut least_sum, mut least_max) = (f64::INFINITY, f64::INFINITY);
            for chosen in 0u32..1 << tree.len() {
                let chosen = (0..tree.len()).filter(|v| chosen >> v & 1 == 1);
                let aggregators: Vec<_> = chosen.collect();
                if aggregators.len() <= most && aggregators.iter().all(|v| tree[*v].can_aggregate) {
                    least_sum = least_sum.min(utilization(&tree, &aggregators));
                    least_max = least_max.min(busiest(&tree, &aggregators));
                }
            }
            let (sum, max) = (least_utilization(&tree, most), least_congestion(&tree, most));
            for (choice, least, time) in [
                (&sum, least_sum, utilization(&tree, &sum.aggregators)),
                (&max, least_max, busiest(&tree, &max.aggregators)),
            ] {
                prop_assert!((choice.time - least).abs() < 1e-9, "{:?} {}", choice, least);
                prop_assert!((time - least).abs() < 1e-9, "{:?} {}", choice, least);
                prop_assert!(choice.aggregators.len() <= most);
                prop_assert!(choice.aggregators.iter().all(|v| tree[*v].can_aggregate));
            }
        }
    }
}
