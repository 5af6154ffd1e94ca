//! A plan as an SVG image: the tree of domains and hosts, one row each.

use std::collections::BTreeMap;

use racksum_placer::topology::{HostId, Topology, VertexId};
use racksum_proto::counted::counted;

use super::Planned;
use super::text::rank_numbers;
use super::words::step;

/// Returns an image of the hosts in use and the domains above them, with the ranks and aggregators
/// of each and the rates of its link. The link that limits the step stands out. The image needs no
/// other file, and follows the reader's choice of light or dark.
pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { topology, plan, .. } = planned;
    let rows = rows(planned);
    let indent = |row: &Row| MARGIN + INDENT * topology.depth(row.vertex);
    let name_end = |row: &Row| indent(row) + width(&row.name);
    let badges_at = rows.iter().map(name_end).max().unwrap_or(0) + COLUMN_GAP;
    let badges_end = |row: &Row| row.badges.iter().map(badge_width).sum::<usize>();
    let rates_at = badges_at + rows.iter().map(badges_end).max().unwrap_or(0) + COLUMN_GAP;
    let rates_end = rows.iter().map(|row| width(&row.rates)).max().unwrap_or(0);
    let title = format!("{}: {}", planned.job.name, step(plan.time.total_s()));
    let total_width = (rates_at + rates_end).max(MARGIN + width(&title)) + MARGIN;
    let total_height = HEAD + ROW * rows.len() + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total_width}\" \
         height=\"{total_height}\" viewBox=\"0 0 {total_width} {total_height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n\
         <text class=\"title\" x=\"{MARGIN}\" y=\"{TITLE_Y}\">{title}</text>\n",
        title = escaped(&title),
    );
    let mut at: BTreeMap<VertexId, usize> = BTreeMap::new();
    for (index, row) in rows.iter().enumerate() {
        let (x, y) = (indent(row), HEAD + ROW * index + ROW / 2);
        at.insert(row.vertex, y);
        let class = if row.is_bottleneck { " limit" } else { "" };
        if let Some(above) = topology.parent(row.vertex).and_then(|parent| at.get(&parent)) {
            let (from_x, from_y) = (x - INDENT + STEM, above + ROW / 3);
            let end = x - 4;
            svg += &format!("<path class=\"link{class}\" d=\"M{from_x} {from_y}V{y}H{end}\"/>\n");
        }
        svg += &text("name", x, y, &row.name);
        let mut badge_x = badges_at;
        for badge in &row.badges {
            let (left, top) = (badge_x, y - BADGE / 2);
            let (kind, inner) = (badge.kind, badge_width(badge) - BADGE_GAP);
            svg += &format!(
                "<rect class=\"{kind}\" x=\"{left}\" y=\"{top}\" width=\"{inner}\" \
                 height=\"{BADGE}\" rx=\"4\"/>\n"
            );
            svg += &text("badge", badge_x + BADGE_PADDING, y, &badge.label);
            badge_x += badge_width(badge);
        }
        if !row.rates.is_empty() {
            svg += &text(&format!("rates{class}"), rates_at, y, &row.rates);
        }
    }
    svg + "</svg>"
}

/// A domain or host.
struct Row {
    vertex: VertexId,
    name: String,
    badges: Vec<Badge>,
    rates: String,
    is_bottleneck: bool,
}

/// The members of the job on a host.
struct Badge {
    /// The class in the style sheet.
    kind: &'static str,
    label: String,
}

/// Returns the hosts with members of the job, and the domains above them, in the order of the tree.
fn rows(planned: &Planned<'_>) -> Vec<Row> {
    let Planned { topology, links, plan, .. } = planned;
    let mut badges: BTreeMap<VertexId, Vec<Badge>> = BTreeMap::new();
    let mut add = |host: HostId, kind: &'static str, label: String| {
        badges.entry(topology.leaf(host)).or_default().push(Badge { kind, label });
    };
    for (host, ranks, aggregators) in planned.hosts() {
        if !ranks.is_empty() {
            add(host, "ranks", rank_numbers(ranks));
        }
        if aggregators > 0 {
            add(host, "aggregators", counted(aggregators, "aggregator"));
        }
    }
    for (number, standby) in (1..).zip(&plan.standbys) {
        for (host, _) in standby.hosts() {
            add(host, "standby", format!("standby {number}"));
        }
    }
    if let Some(tree) = &plan.tree {
        let parent = &topology.host(tree.root).name;
        for rack in &tree.racks {
            add(*rack, "aggregators", format!("rack aggregator, parent {parent}"));
        }
    }
    let mut rows: BTreeMap<VertexId, Row> = BTreeMap::new();
    let leaves: Vec<_> = badges.keys().copied().collect();
    for leaf in leaves {
        let ancestors = std::iter::successors(Some(leaf), |vertex| topology.parent(*vertex));
        for vertex in ancestors {
            rows.entry(vertex).or_insert_with(|| Row {
                vertex,
                name: name(topology, vertex),
                badges: badges.remove(&vertex).unwrap_or_default(),
                rates: match topology.parent(vertex) {
                    None => String::new(),
                    Some(_) => {
                        let (up, down) = (links.up(vertex).mbit(), links.down(vertex).mbit());
                        format!("{up:.0} up, {down:.0} down Mbit/s")
                    }
                },
                is_bottleneck: plan.time.bottleneck.is_link_of(vertex),
            });
        }
    }
    rows.into_values().collect()
}

/// Returns the last label of a domain's path, or a host's name.
fn name(topology: &Topology, vertex: VertexId) -> String {
    match topology.name(vertex) {
        "" => "the whole cluster".into(),
        path if topology.depth(vertex) <= topology.levels().len() => {
            path.rsplit('/').next().unwrap_or(path).into()
        }
        name => name.into(),
    }
}

fn text(class: &str, x: usize, y: usize, text: &str) -> String {
    let y = y + 4;
    format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>\n", escaped(text))
}

/// Returns the width of a text in pixels: each character of the font takes less than 8.
fn width(text: &str) -> usize {
    text.chars().count() * 8
}

fn badge_width(badge: &Badge) -> usize {
    width(&badge.label) + 2 * BADGE_PADDING + BADGE_GAP
}

/// Escapes the characters with a meaning in XML.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;")
}

const STYLE: &str = "\
    text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}\
    .title{font-weight:bold;font-size:13px}\
    .page{fill:#ffffff}\
    .link{fill:none;stroke:#8c959f;stroke-width:1.5}\
    .rates{fill:#59636e}\
    .ranks{fill:#cfe3ff}.aggregators{fill:#ffdfb6}\
    .standby{fill:none;stroke:#bc4c00;stroke-dasharray:3 2}\
    path.limit{stroke:#cf222e;stroke-width:3}\
    text.limit{fill:#cf222e;font-weight:bold}\
    @media(prefers-color-scheme:dark){\
    text{fill:#e6edf3}.page{fill:#0d1117}.link{stroke:#6e7681}.rates{fill:#9198a1}\
    .ranks{fill:#1f3d66}.aggregators{fill:#6b3f0c}.standby{stroke:#f0883e}\
    path.limit{stroke:#ff7b72}text.limit{fill:#ff7b72}}";
const MARGIN: usize = 16;
const TITLE_Y: usize = 28;
/// The height of the title.
const HEAD: usize = 44;
const ROW: usize = 26;
const INDENT: usize = 24;
/// The distance of the line to the children from the start of a name.
const STEM: usize = 8;
const COLUMN_GAP: usize = 24;
const BADGE: usize = 18;
const BADGE_PADDING: usize = 6;
const BADGE_GAP: usize = 8;
