//! The rates between all hosts as a picture.

use std::fmt::Write;

use racksum_placer::network::{Links, Rate, Source};
use racksum_placer::topology::{HostId, Topology};

/// Returns an SVG with a row per sender and a column per receiver. Colours show rates on a
/// logarithmic scale. Cells of paths that were measured by themselves have a border, cells that no
/// measurement is about are hatched, and lines separate the innermost domains.
///
/// # Errors
/// If the cluster has too many hosts for a picture.
pub(super) fn of(topology: &Topology, links: &Links) -> Result<String, String> {
    let hosts: Vec<_> = topology.host_ids().collect();
    if hosts.len() > MOST_HOSTS {
        return Err(format!(
            "a heat map shows at most {MOST_HOSTS} hosts, and there are {}; pass --nodes with \
             fewer hosts",
            hosts.len()
        ));
    }
    let mut map = Map::new(topology, links, &hosts);
    map.draw_labels();
    map.draw_cells();
    map.draw_domains();
    map.draw_legend();
    Ok(map.finish())
}

struct Map<'a> {
    topology: &'a Topology,
    links: &'a Links,
    hosts: &'a [HostId],
    layout: Layout,
    /// The range of the colours.
    scale: Option<Scale>,
    svg: String,
}

/// Sizes in pixels.
#[derive(Debug, Clone, Copy)]
struct Layout {
    cell: usize,
    font: usize,
    /// The place of the first column and of the first row.
    left: usize,
    /// One more than the place of the last column and row.
    end: usize,
}

/// The least and the greatest rate that were measured, in Mbit/s. Both are positive.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Scale {
    least: f64,
    most: f64,
}

impl Layout {
    fn new(hosts: usize, longest_name: usize) -> Self {
        let (cell, font) = if hosts <= FEW_HOSTS { (22, 12) } else { (12, 10) };
        let layout = Self { cell, font, left: 0, end: 0 };
        let left = layout.width_of(longest_name) + 2 * MARGIN;
        Self { left, end: left + cell * hosts, ..layout }
    }

    /// Returns the width of a text: a letter is at most about seven tenths as wide as high.
    const fn width_of(&self, letters: usize) -> usize {
        letters * self.font * 7 / 10
    }

    const fn at(&self, place: usize) -> usize {
        self.left + self.cell * place
    }

    /// Returns the place of a row of the legend.
    const fn legend_row(&self, row: usize) -> usize {
        self.end + MARGIN + row * 2 * self.font
    }
}

impl<'a> Map<'a> {
    fn new(topology: &'a Topology, links: &'a Links, hosts: &'a [HostId]) -> Self {
        let longest = hosts.iter().map(|host| topology.host(*host).name.chars().count()).max();
        let layout = Layout::new(hosts.len(), longest.unwrap_or(0));
        let pairs = hosts.iter().flat_map(|from| hosts.iter().map(move |to| (*from, *to)));
        let rates = pairs.filter_map(|(from, to)| links.path(topology, from, to));
        let scale = Scale::of(rates.filter(|rate| is_measured(*rate)).map(Rate::mbit));
        let width = (layout.end + MARGIN).max(LEAST_WIDTH);
        let height = layout.legend_row(LEGEND_ROWS) + MARGIN;
        let font = layout.font;
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"{font}\" role=\"img\">\n\
             <title>Goodput between hosts in Mbit/s</title>\n\
             <style>text{{fill:#222}}line{{stroke:#222}}\
             .cell{{stroke:#888;stroke-width:.5}}.own{{stroke:#222;stroke-width:2}}\
             @media(prefers-color-scheme:dark){{text{{fill:#ddd}}line,.own{{stroke:#ddd}}}}\
             </style>\n\
             <defs><pattern id=\"none\" width=\"4\" height=\"4\" patternUnits=\"userSpaceOnUse\">\
             <path d=\"M0 4L4 0\" stroke=\"#888\"/></pattern></defs>\n"
        );
        Self { topology, links, hosts, layout, scale, svg }
    }

    fn name(&self, host: HostId) -> String {
        escaped(&self.topology.host(host).name)
    }

    fn add(&mut self, text: std::fmt::Arguments<'_>) {
        self.svg.write_fmt(text).expect("a String takes all text");
    }

    fn draw_labels(&mut self) {
        let Layout { cell, font, left, .. } = self.layout;
        for (place, host) in self.hosts.iter().enumerate() {
            // The baseline of text is a little above its lower end.
            let (name, at) = (self.name(*host), self.layout.at(place) + (cell + font) / 2 - 2);
            let x = left - MARGIN / 2;
            self.add(format_args!(
                "<text x=\"{x}\" y=\"{at}\" text-anchor=\"end\">{name}</text>\n\
                 <text transform=\"translate({at} {x}) rotate(-90)\">{name}</text>\n"
            ));
        }
    }

    fn draw_cells(&mut self) {
        for (row, &from) in self.hosts.iter().enumerate() {
            for (column, &to) in self.hosts.iter().enumerate() {
                let Some(rate) = self.links.path(self.topology, from, to) else { continue };
                let (x, y) = (self.layout.at(column), self.layout.at(row));
                let is_own = self.links.ceiling(from, to).is_some();
                let class = if is_own { "cell own" } else { "cell" };
                let fill = color(rate, self.scale);
                let (title, cell) = (self.title(rate, from, to), self.layout.cell);
                self.add(format_args!(
                    "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{cell}\" \
                     height=\"{cell}\" fill=\"{fill}\"><title>{title}</title></rect>\n"
                ));
            }
        }
    }

    /// Returns the rate and the round-trip times of a path in words.
    fn title(&self, rate: Rate, from: HostId, to: HostId) -> String {
        let origin = match rate.source {
            _ if self.links.ceiling(from, to).is_some() => "measured by itself",
            Source::Measured => "measured link",
            Source::Inferred => "inferred from measured paths",
            Source::Nominal => "not measured: rate of the interface",
            Source::Unknown => "not measured",
        };
        let micros = |trip: Option<f64>| match trip {
            Some(trip) => format!("{:.0} \u{b5}s", trip * 1e6),
            None => "not measured".to_owned(),
        };
        let (median, p99) = self.links.round_trips(self.topology, from, to);
        format!(
            "{} to {}: {:.1} Mbit/s, {origin}; round trip {}, 99th percentile {}",
            self.name(from),
            self.name(to),
            rate.mbit(),
            micros(median),
            micros(p99)
        )
    }

    /// Draws lines between the innermost domains.
    fn draw_domains(&mut self) {
        let Layout { left, end, .. } = self.layout;
        let domain = |host: HostId| self.topology.domain_of(host);
        let neighbours = self.hosts.windows(2).enumerate();
        let borders = neighbours.filter(|(_, pair)| domain(pair[0]) != domain(pair[1]));
        for place in borders.map(|(place, _)| place + 1).collect::<Vec<_>>() {
            let at = self.layout.at(place);
            self.add(format_args!(
                "<line x1=\"{left}\" y1=\"{at}\" x2=\"{end}\" y2=\"{at}\"/>\
                 <line x1=\"{at}\" y1=\"{left}\" x2=\"{at}\" y2=\"{end}\"/>\n"
            ));
        }
    }

    fn draw_legend(&mut self) {
        let mut rates = vec![];
        if let Some(scale) = self.scale {
            let steps = if scale.most > scale.least { SWATCHES } else { 1 };
            let shares = (0..steps).map(|step| f64::from(step) / f64::from(SWATCHES - 1));
            rates.extend(shares.map(|share| {
                let mbit = scale.least * (scale.most / scale.least).powf(share);
                (ramp(share_of(mbit, scale)), format!("{mbit:.1}"))
            }));
        }
        let end = self.draw_swatches(0, &rates);
        if !rates.is_empty() {
            self.draw_text(0, end, "Mbit/s");
        }
        let others = [(HATCHED, "not measured"), (DEAD, "nothing passes")];
        self.draw_swatches(1, &others.map(|(fill, text)| (fill.to_owned(), text.to_owned())));
        self.draw_text(2, MARGIN, "rows send, columns receive");
        self.draw_text(3, MARGIN, "a border marks a path that was measured by itself");
    }

    /// Draws swatches in a row of the legend. Returns the place after the last one.
    fn draw_swatches(&mut self, row: usize, swatches: &[(String, String)]) -> usize {
        let (font, y, mut x) = (self.layout.font, self.layout.legend_row(row), MARGIN);
        for (fill, text) in swatches {
            self.add(format_args!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{font}\" height=\"{font}\" fill=\"{fill}\" \
                 stroke=\"#888\"/>"
            ));
            x = self.draw_text(row, x + font + MARGIN / 2, text);
        }
        x
    }

    /// Draws a text in a row of the legend. Returns the place after it.
    fn draw_text(&mut self, row: usize, x: usize, text: &str) -> usize {
        let y = self.layout.legend_row(row) + self.layout.font - 2;
        self.add(format_args!("<text x=\"{x}\" y=\"{y}\">{text}</text>\n"));
        x + self.layout.width_of(text.chars().count()) + MARGIN
    }

    fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }
}

impl Scale {
    /// Returns the range of the rates that are positive, if any is.
    fn of(rates: impl Iterator<Item = f64>) -> Option<Self> {
        let one = |mbit: f64| Self { least: mbit, most: mbit };
        let both = |one: Self, other: Self| Self {
            least: one.least.min(other.least),
            most: one.most.max(other.most),
        };
        rates.filter(|mbit| *mbit > 0.0).map(one).reduce(both)
    }
}

const fn is_measured(rate: Rate) -> bool {
    matches!(rate.source, Source::Measured | Source::Inferred)
}

fn color(rate: Rate, scale: Option<Scale>) -> String {
    match scale {
        Some(scale) if is_measured(rate) && rate.mbit() > 0.0 => ramp(share_of(rate.mbit(), scale)),
        _ if is_measured(rate) => DEAD.to_owned(),
        _ => HATCHED.to_owned(),
    }
}

/// Returns where a rate is between the least (0) and the greatest (1), on a logarithmic scale.
fn share_of(mbit: f64, Scale { least, most }: Scale) -> f64 {
    let span = (most / least).ln();
    if span > 0.0 { ((mbit / least).ln() / span).clamp(0.0, 1.0) } else { 1.0 }
}

/// Returns a colour between violet (slow), green, and yellow (fast). All three differ in lightness
/// and are visible on white and on black.
fn ramp(share: f64) -> String {
    const STOPS: [[f64; 3]; 3] = [[88.0, 60.0, 165.0], [45.0, 160.0, 145.0], [250.0, 225.0, 90.0]];
    let ([slow, fast], share) = match share < 0.5 {
        true => ([STOPS[0], STOPS[1]], share * 2.0),
        false => ([STOPS[1], STOPS[2]], share * 2.0 - 1.0),
    };
    let mix = |part: usize| slow[part] + (fast[part] - slow[part]) * share;
    format!("rgb({:.0} {:.0} {:.0})", mix(0), mix(1), mix(2))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The fill of cells that no measurement is about.
const HATCHED: &str = "url(#none)";
/// The colour of paths that nothing passes.
const DEAD: &str = "rgb(200 40 40)";
/// Colours of the legend.
const SWATCHES: u32 = 5;
/// The space around the picture.
const MARGIN: usize = 8;
/// The width that the legend needs.
const LEAST_WIDTH: usize = 560;
/// Rows of the legend.
const LEGEND_ROWS: usize = 4;
/// Pictures with more hosts have smaller cells.
const FEW_HOSTS: usize = 40;
/// The greatest number of hosts in a picture.
const MOST_HOSTS: usize = 256;

#[cfg(test)]
mod tests {
    use racksum_placer::inventory::Inventory;
    use racksum_placer::network::Network;

    use super::*;

    /// Returns a picture of hosts in racks of four.
    fn picture(hosts: usize, network: &str) -> String {
        let host = |number: usize| {
            let rack = number / 4;
            format!(
                "[[hosts]]\nname = 'host-{number:03}'\nnic_mbit = 100\n\
                 labels = {{ rack = 'r{rack}' }}\n"
            )
        };
        let hosts: String = (0..hosts).map(host).collect();
        let inventory: Inventory = toml::from_str(&format!("levels = ['rack']\n{hosts}")).unwrap();
        let topology = Topology::new(&inventory).unwrap();
        let network: Network = toml::from_str(network).unwrap();
        of(&topology, &Links::new(&topology, &network).unwrap()).unwrap()
    }

    /// Returns the numbers of an attribute of all elements whose line has `which`.
    fn numbers(svg: &str, which: &str, attribute: &str) -> Vec<usize> {
        let parts = svg.split('<').filter(|part| part.contains(which));
        let values = parts.filter_map(|part| part.split_once(attribute));
        values.map(|(_, rest)| rest.split(['"', ' ']).next().unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn labels_do_not_overlap_and_all_is_inside_the_picture() {
        for hosts in [1, 2, 12, 40, 41, 200, 256] {
            let svg = picture(hosts, "");
            assert_eq!(svg.matches("<rect class=\"cell").count(), hosts * (hosts - 1));
            let font = numbers(&svg, "svg ", "font-size=\"")[0];
            for places in [numbers(&svg, "anchor", "y=\""), numbers(&svg, "rotate", "translate(")] {
                assert_eq!(places.len(), hosts);
                assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= font), "{places:?}");
            }
            let size: Vec<usize> = svg
                .split_once("viewBox=\"0 0 ")
                .unwrap()
                .1
                .split(['"', ' '])
                .take(2)
                .map(|number| number.parse().unwrap())
                .collect();
            let [width, height] = size[..] else { panic!("{size:?}") };
            assert!(numbers(&svg, "text ", " y=\"").iter().all(|y| *y < height));
            // The longest text of the legend.
            let last = svg.split("<text x=\"8\"").last().unwrap();
            let text = last.split_once('>').unwrap().1.split_once('<').unwrap().0;
            assert!(8 + text.len() * font * 7 / 10 < width, "{text}");
        }
    }

    #[test]
    fn cells_that_were_not_measured_are_hatched_and_say_so() {
        let svg = picture(2, "");
        assert_eq!(svg.matches("fill=\"url(#none)\"").count(), 2 + 1, "{svg}");
        let title = "host-000 to host-001: 94.0 Mbit/s, not measured: rate of the interface; round \
                     trip not measured, 99th percentile not measured";
        assert!(svg.contains(title), "{svg}");
        assert!(!svg.contains("Mbit/s</text>"), "there is no scale: {svg}");
    }

    #[test]
    fn the_legend_has_units_and_titles_have_both_round_trips() {
        let host = |name: &str, mbit: u32| {
            format!(
                "[[links]]\nof = '{name}'\nup = {{ mbit = {mbit} }}\ndown = {{ mbit = {mbit} }}\n\
                 rtt_us = 40\nrtt_p99_us = 90\n"
            )
        };
        let dead = "[[pairs]]\nfrom = 'host-001'\nto = 'host-000'\npath = { mbit = 0, loss = 1 }\n";
        let hosts: Vec<_> = [("host-000", 100), ("host-001", 10), ("host-002", 100)]
            .map(|(n, m)| host(n, m))
            .into();
        let svg = picture(4, &format!("{dead}{}", hosts.concat()));
        let title = "host-000 to host-001: 10.0 Mbit/s, measured link; round trip 80 \u{b5}s, 99th \
                     percentile 180 \u{b5}s";
        assert!(svg.contains(title), "{svg}");
        let dead = "host-001 to host-000: 0.0 Mbit/s, measured by itself";
        assert!(svg.contains(dead) && svg.matches(DEAD).count() == 2, "{svg}");
        for text in [">10.0<", ">31.6<", ">100.0<", ">Mbit/s<", ">nothing passes<"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf,"), "{svg}");
    }
}
