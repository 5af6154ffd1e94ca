//! The rates between all hosts as a picture.

use std::fmt::Write;

use racksum_placer::network::{Links, Rate, Source};
use racksum_placer::topology::{HostId, Topology};

/// Returns an SVG with a row per sender and a column per receiver. A darker cell is a slower path.
/// Cells of paths that were measured by themselves have a border.
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
    let rate = |from: HostId, to: HostId| links.path(topology, from, to);
    let pairs = hosts.iter().flat_map(|from| hosts.iter().map(move |to| (*from, *to)));
    let rates = pairs.clone().filter_map(|(from, to)| rate(from, to)).map(Rate::mbit);
    let (least, most) = rates
        .fold((f64::INFINITY, 0.0f64), |(least, most), mbit| (least.min(mbit), most.max(mbit)));
    let label_width = hosts.iter().map(|host| topology.host(*host).name.chars().count()).max();
    let left = LABEL * label_width.unwrap_or(0) + 2 * CELL;
    let (width, height) = (left + CELL * hosts.len() + CELL, left + CELL * hosts.len() + 3 * CELL);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <title>Goodput between hosts in Mbit/s</title>\n\
         <style>text{{fill:#222}}@media(prefers-color-scheme:dark){{text{{fill:#ddd}}}}</style>\n"
    );
    for (place, host) in hosts.iter().enumerate() {
        let (name, at) = (escaped(&topology.host(*host).name), left + CELL * place + CELL * 2 / 3);
        add(
            &mut svg,
            format_args!("<text x=\"{}\" y=\"{at}\" text-anchor=\"end\">{name}</text>\n", left - 4),
        );
        add(
            &mut svg,
            format_args!(
                "<text transform=\"translate({at} {}) rotate(-90)\">{name}</text>\n",
                left - 4
            ),
        );
    }
    for (from, to) in pairs {
        let Some(rate) = rate(from, to) else { continue };
        let place = |host: HostId| hosts.iter().position(|it| *it == host).unwrap_or(0);
        let (x, y) = (left + CELL * place(to), left + CELL * place(from));
        let is_measured = links.ceiling(from, to).is_some();
        let border = if is_measured { " stroke=\"#888\" stroke-width=\"2\"" } else { "" };
        add(
            &mut svg,
            format_args!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{CELL}\" height=\"{CELL}\" fill=\"{}\"{border}>\
                 <title>{} to {}: {:.1} Mbit/s, {}</title></rect>\n",
                color(rate.mbit(), least, most),
                escaped(&topology.host(from).name),
                escaped(&topology.host(to).name),
                rate.mbit(),
                origin(rate, is_measured),
            ),
        );
    }
    let y = height - CELL;
    add(
        &mut svg,
        format_args!(
            "<text x=\"{left}\" y=\"{y}\">rows send, columns receive; {least:.1} (dark) to \
             {most:.1} Mbit/s</text>\n</svg>\n"
        ),
    );
    Ok(svg)
}

fn add(svg: &mut String, text: std::fmt::Arguments<'_>) {
    svg.write_fmt(text).expect("a String takes all text");
}

fn origin(rate: Rate, is_measured: bool) -> &'static str {
    match rate.source {
        _ if is_measured => "measured by itself",
        Source::Measured => "measured link",
        Source::Inferred => "inferred from measured paths",
        Source::Nominal => "not measured: rate of the interface",
        Source::Unknown => "not measured",
    }
}

/// Returns a colour between dark blue (slow) and pale yellow (fast), on a logarithmic scale.
fn color(mbit: f64, least: f64, most: f64) -> String {
    let span = (most / least).ln();
    let share = match mbit {
        _ if mbit <= 0.0 => 0.0,
        _ if span > 0.0 => (mbit / least).ln() / span,
        _ => 1.0,
    };
    let mix = |slow: f64, fast: f64| slow + (fast - slow) * share.clamp(0.0, 1.0);
    format!("rgb({:.0} {:.0} {:.0})", mix(40.0, 253.0), mix(30.0, 231.0), mix(120.0, 120.0))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The width of a cell.
const CELL: usize = 22;
/// The width of a character of a label.
const LABEL: usize = 7;
/// The greatest number of hosts in a picture.
const MOST_HOSTS: usize = 256;
