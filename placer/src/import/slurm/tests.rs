//! Tests of topology files: real forms, bad files, and random text.

use proptest::prelude::*;

use super::*;

/// A tree of two rows, as in topology.conf(5), with the forms that its grammar allows.
const TREE: &str = "\
# The fabric of the cluster.
SwitchName=leaf1 Nodes=n[001-002] LinkSpeed=100
switchname = leaf2  NODES=\"n003,gpu[1-2]-ib0\"  # a comment
SwitchName=leaf3 \\
    Nodes=n[004-005]

SwitchName=row1 Switches=leaf[1-2]
SwitchName=row2 Switches=leaf3
SwitchName=root Switches=row[1-2]
";

const BLOCKS: &str = "\
BlockName=b1 Nodes=n[1-4]
BlockName=b2 Nodes=n[5-8]
BlockName=b3 Nodes=n[9-12]
BlockSizes=4,8
";

const YAML: &str = "\
---
- topology: fabric
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - switch: s1
        nodes: n[01-02]
      - switch: s2
        nodes: n[03-04]
- topology: nvlink
  cluster_default: false
  block:
    block_sizes:
      - 2
      - 4
    blocks:
      - block: b1
        nodes: n[01-02]
      - block: b2
        nodes: n[03-04]
- topology: plain
  flat: true
- topology: ring
  ring:
    rings: []
";

fn conf(text: &str) -> Result<Import, ImportError> {
    read(text, Format::Conf, None)
}

fn why(text: &str) -> String {
    conf(text).unwrap_err().to_string()
}

/// Returns the path of a host, widest level first.
fn path(import: &Import, host: &str) -> String {
    let host = import.hosts.iter().find(|known| known.name == host).unwrap();
    let labels = import.levels.iter().map(|level| host.labels[level].as_str());
    labels.collect::<Vec<_>>().join("/")
}

#[test]
fn a_tree_has_its_levels_widest_first() {
    let import = conf(TREE).unwrap();
    assert_eq!(import.levels, ["level2", "level1", "level0"]);
    assert_eq!(path(&import, "n002"), "root/row1/leaf1");
    assert_eq!(path(&import, "gpu2-ib0"), "root/row1/leaf2");
    assert_eq!(path(&import, "n005"), "root/row2/leaf3");
    assert_eq!((import.hosts.len(), import.notes.len()), (7, 0));
    let rates = ["25000".parse().unwrap(), "n[004-005]=100000".parse().unwrap()];
    let inventory = import.inventory(&rates).unwrap();
    let rate = |name| inventory.hosts.iter().find(|host| host.name == name).unwrap().nic_mbit;
    assert_eq!((rate("n001"), rate("n005")), (25_000.0, 100_000.0));
    import.check_rates(&rates).unwrap();
    assert_eq!(
        import.check_rates(&["n[004-006]=1".parse().unwrap()]).unwrap_err().to_string(),
        "the file does not list host \"n006\", for whose network interface a rate is given"
    );
}

#[test]
fn an_import_has_only_the_hosts_of_an_allocation() {
    let import = conf(TREE).unwrap();
    let names = ["n005", "n001"].map(str::to_owned);
    let only = import.clone().only(&names).unwrap();
    assert_eq!(only.hosts.iter().map(|host| &host.name).collect::<Vec<_>>(), ["n005", "n001"]);
    assert_eq!(
        import.only(&["n9".into()]).unwrap_err().to_string(),
        "the file does not list host \"n9\"; every host needs a place in the topology"
    );
    assert_eq!(
        conf(TREE).unwrap().only(&["n005".into(), "n005".into()]).unwrap_err().to_string(),
        "\"n005\" is listed twice; list it once"
    );
    // A flat network has every host.
    let flat = read(YAML, Format::Yaml, Some("plain")).unwrap().only(&names).unwrap();
    assert_eq!((flat.levels.len(), flat.hosts.len()), (0, 2));
    assert_eq!(
        flat.inventory(&["n001=5".parse().unwrap()]).unwrap_err().to_string(),
        "host \"n005\": the rate of its network interface is not given; give one for all hosts"
    );
}

#[test]
fn blocks_join_to_blocks_of_the_greater_sizes() {
    let import = conf(BLOCKS).unwrap();
    assert_eq!(import.levels, ["block8", "block"]);
    assert_eq!(path(&import, "n4"), "b[1-2]/b1");
    assert_eq!(path(&import, "n5"), "b[1-2]/b2");
    assert_eq!(path(&import, "n9"), "b3/b3");
    let plain = conf("BlockName=b1 Nodes=n1\nBlockName=b2 Nodes=n2").unwrap();
    assert_eq!(plain.levels, ["block"]);
}

/// A list of all names for each host would take gigabytes, and hours to make.
#[test]
fn the_name_of_many_joined_blocks_is_short() {
    let blocks = (0..20_000).map(|n| format!("BlockName=b{} Nodes=n{n}\n", 2 * n));
    let text = format!("{}BlockSizes=1,16,16384", blocks.collect::<String>());
    let import = conf(&text).unwrap();
    assert_eq!(
        path(&import, "n0"),
        "b0 to b32766/b[0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30]/b0"
    );
    assert_eq!(import.hosts[16_384].labels["block16384"], "b32768 to b39998");
}

/// Topograph chooses sizes for domains of *D* hosts: *D*, 2 *D*, 4 *D* and so on, up to the largest
/// power of two that is at most the number of domains (docs.nvidia.com/topograph, Slurm engine).
/// racksum chooses no block sizes: it has no scheduler that places jobs in units of blocks. It
/// reads them as levels, and these sizes are the ones whose blocks are whole.
#[test]
fn topograph_block_sizes_are_the_sizes_of_whole_blocks() {
    for (domains, chosen) in [(1, &[8][..]), (2, &[8, 16]), (3, &[8, 16]), (4, &[8, 16, 32])] {
        let blocks = (0..domains)
            .map(|block| format!("BlockName=b{block} Nodes=n[{}-{}]\n", block * 8, block * 8 + 7));
        let text = format!("{}BlockSizes=8,16,32", blocks.collect::<String>());
        let import = conf(&text).unwrap();
        assert_eq!(import.levels, ["block32", "block16", "block"]);
        // A level is of use if one of its domains is full.
        let fills = |level: &String, size: usize| {
            let first = &import.hosts[0].labels[level];
            import.hosts.iter().filter(|host| host.labels[level] == *first).count() == size
        };
        let full = import.levels.iter().rev().zip([8, 16, 32]);
        let full: Vec<_> =
            full.filter(|&(level, size)| fills(level, size)).map(|(_, size)| size).collect();
        assert_eq!(full, chosen, "{domains}");
    }
}

#[test]
fn yaml_has_a_default_and_names() {
    let import = read(YAML, Format::Yaml, None).unwrap();
    assert_eq!(import.levels, ["level1", "level0"]);
    assert_eq!(path(&import, "n03"), "root/s2");
    let import = read(YAML, Format::Yaml, Some("nvlink")).unwrap();
    assert_eq!(import.levels, ["block4", "block"]);
    assert_eq!(path(&import, "n03"), "b[1-2]/b2");
    let why = |text: &str, name| read(text, Format::Yaml, name).unwrap_err().to_string();
    assert_eq!(
        why(YAML, Some("torus")),
        "the file has no topology \"torus\"; it has fabric, nvlink, plain, ring"
    );
    assert_eq!(
        why(YAML, Some("ring")),
        "line 25: topology \"ring\" must be exactly one of tree, block and flat; racksum reads no \
         others"
    );
    let of_two = YAML.replace("  flat: true", "  flat: true\n  block: {blocks: []}");
    assert_eq!(
        why(&of_two, Some("plain")),
        "line 23: topology \"plain\" must be exactly one of tree, block and flat; racksum reads no \
         others"
    );
    assert_eq!(
        why(&YAML.replace("cluster_default: true", "cluster_default: false"), None),
        "the file has several topologies; choose fabric or nvlink or plain or ring"
    );
    assert_eq!(
        why(&YAML.replace("topology: plain", "topology: fabric"), None),
        "line 23: topology \"fabric\" is defined twice, first in line 2; define it once"
    );
    assert_eq!(
        why(&YAML.replace("children: s[1-2]", "children: s[1-3]"), None),
        "line 6: switch \"root\" lists the switch \"s3\", which the file does not define"
    );
}

#[test]
fn yaml_that_is_wrong_is_refused_with_its_line() {
    for (from, to, start) in [
        ("block_sizes:\n      - 2", "block_sizes:\n      - two", "line 16: invalid u32"),
        ("      - switch: s1\n", "      - name: s1\n", "line 8: unknown field"),
        ("- topology: plain", "- topology: [", "line "),
        ("nodes: n[01-02]", "nodes: n[01-", "line 8: \"n[01-\" has brackets that do not match"),
        ("- topology: plain", "---\n- topology: plain", "line 24: only single"),
        ("nodes: n[01-02]", "nodes: ${HOME}", "line 8: \"${HOME}\" contains '$'"),
        ("  flat: true", "  flat: true\n  flat: true", "line 25: "),
    ] {
        let text = YAML.replacen(from, to, 1);
        assert_ne!(text, YAML, "{from}");
        let why = read(&text, Format::Yaml, None).unwrap_err().to_string();
        assert!(why.starts_with(start) && !why.contains('\n'), "{why}");
        assert!(!why.contains("from_str") && !why.contains("Options"), "{why}");
    }
    // A tag is ignored, so none reads another file.
    let include = YAML.replacen("topology: fabric", "topology: !include /etc/passwd", 1);
    assert_eq!(read(&include, Format::Yaml, Some("/etc/passwd")), read(YAML, Format::Yaml, None));
    // Windows writes a byte-order mark and other ends of lines.
    let windows = format!("\u{feff}{}", YAML.replace('\n', "\r\n"));
    assert_eq!(read(&windows, Format::Yaml, None), read(YAML, Format::Yaml, None));
    // An alias bomb ends in an error, and not in memory.
    let mut bomb = "- &a0 {topology: x}\n".to_owned();
    for level in 1..30 {
        bomb.push_str(&format!("- &a{level} [*a{0}, *a{0}, *a{0}, *a{0}]\n", level - 1));
    }
    read(&bomb, Format::Yaml, None).unwrap_err();
}

#[test]
fn a_cycle_is_named_with_its_line() {
    let text = "\
SwitchName=leaf Nodes=n1
SwitchName=a Switches=b,leaf
SwitchName=b Switches=c
SwitchName=c Switches=a
";
    let why_cycle = "form a cycle; each switch needs a way up to one that nothing is above";
    assert_eq!(why(text), format!("line 2: the switches a > b > c > a {why_cycle}"));
    assert_eq!(why("SwitchName=s Switches=s"), format!("line 1: the switches s > s {why_cycle}"));
    // The rest of the file may be a tree.
    let two = format!("SwitchName=root Switches=x\nSwitchName=x Nodes=n2\n{text}");
    assert_eq!(why(&two), format!("line 4: the switches a > b > c > a {why_cycle}"));
}

#[test]
fn what_is_no_tree_is_refused_with_its_line() {
    let plans = "racksum plans on trees, so list it below one of them";
    for (text, expected) in [
        (
            "SwitchName=a Nodes=n1\nSwitchName=r1 Switches=a\nSwitchName=r2 Switches=a",
            format!("line 3: \"a\" is below \"r2\", and below \"r1\" in line 2; {plans}"),
        ),
        (
            "SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[3-4]",
            format!("line 2: \"n3\" is below \"b\", and below \"a\" in line 1; {plans}"),
        ),
        (
            "BlockName=a Nodes=n[1-3]\nBlockName=b Nodes=n[3-4]",
            format!("line 2: \"n3\" is below \"b\", and below \"a\" in line 1; {plans}"),
        ),
        (
            "SwitchName=a Switches=b",
            "line 1: switch \"a\" lists the switch \"b\", which the file does not define".into(),
        ),
        (
            "SwitchName=a Nodes=n1\n\nSwitchName=a Nodes=n2",
            "line 3: switch \"a\" is defined twice, first in line 1; define it once".into(),
        ),
        (
            "SwitchName=a Nodes=n1 Switches=b\nSwitchName=b Nodes=n2",
            "line 1: switch \"a\" has both Switches and Nodes; put the nodes below a switch of \
             their own, as Slurm requires"
                .into(),
        ),
        ("SwitchName=a Nodes=n[1-4,3]", "line 1: \"n3\" is listed twice; list it once".into()),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Switches=a,a",
            "line 2: \"a\" is listed twice; list it once".into(),
        ),
        ("BlockName=a Nodes=n1,n1", "line 1: \"n1\" is listed twice; list it once".into()),
        ("SwitchName=a\n", "the file lists no hosts".into()),
        ("# nothing\n", "the file lists no hosts".into()),
        (
            "BlockName=a Nodes=n1\nBlockSizes=4,12",
            "line 2: block size 12 does not follow 4: each size is the previous one times 2, 4, 8 \
             and so on"
                .into(),
        ),
        (
            "BlockName=a Nodes=n1\nBlockSizes=0,0",
            "line 2: a block size is 0; give 1 or more".into(),
        ),
    ] {
        assert_eq!(why(text), expected, "{text}");
    }
}

#[test]
fn lines_that_are_wrong_are_refused() {
    for (text, expected) in [
        ("\nSwitchName a", "line 2: expected Key=Value, found \"SwitchName a\""),
        ("SwitchName=a Nodes", "line 1: expected Key=Value, found \"Nodes\""),
        ("=a", "line 1: expected Key=Value, found \"=a\""),
        (
            "SwitchName=a Nodes=\"n1",
            "line 1: the value of Nodes has an opening quote and no closing one",
        ),
        ("SwitchName=a Nodes=n1 nodes=n2", "line 1: nodes is given twice; give it once"),
        (
            "Include other.conf",
            "line 1: Include is not supported; copy the other file's lines into this file",
        ),
        (
            "SwitchName=a \\\n  Nodes=n[2-1]",
            "line 1: \"n[2-1]\": the range 2-1 counts down; write the lower number first",
        ),
        (
            "BlockName=a Nodes=n1 BlockSizes=x",
            "line 1: \"x\" is not a block size; give whole numbers",
        ),
        (
            "SwitchName=a/b Nodes=n1",
            "line 1: \"a/b\" contains '/', which names of hosts and switches cannot contain",
        ),
        (
            "SwitchName=s[0-1] Nodes=n1",
            "line 1: \"s[0-1]\" contains '[', which names of hosts and switches cannot contain",
        ),
    ] {
        assert_eq!(why(text), expected, "{text}");
    }
    assert!(
        why("RingName=r Nodes=n1").starts_with("line 1: unknown key \"RingName\"; racksum reads")
    );
    for mixed in
        ["Nodes=n1", "SwitchName=a BlockName=b", "BlockSizes=4 Nodes=n1", "BlockName=b LinkSpeed=1"]
    {
        assert!(
            why(mixed).starts_with("line 1: the line defines neither a switch nor a block"),
            "{mixed}"
        );
    }
}

#[test]
fn a_file_with_a_tree_and_blocks_needs_a_choice() {
    let both = format!("SwitchName=s Nodes=n[1-12]\n{BLOCKS}");
    assert_eq!(why(&both), "the file has several topologies; choose tree or block");
    let of = |name| read(&both, Format::Conf, Some(name)).map(|import| import.levels);
    assert_eq!(of("tree").unwrap(), ["level0"]);
    assert_eq!(of("block").unwrap(), ["block8", "block"]);
    assert_eq!(
        of("flat").unwrap_err().to_string(),
        "the file has no topology \"flat\"; it has tree, block"
    );
}

/// Slurm accepts trees whose branches differ in depth.
#[test]
fn a_branch_that_skips_a_level_is_noted() {
    let text = "\
SwitchName=leaf1 Nodes=n1
SwitchName=leaf2 Nodes=n2
SwitchName=spine Switches=leaf1
SwitchName=core Switches=spine,leaf2
SwitchName=island Nodes=n3
SwitchName=empty
";
    let import = conf(text).unwrap();
    assert_eq!(path(&import, "n1"), "core/spine/leaf1");
    assert_eq!(path(&import, "n2"), "core/leaf2/leaf2");
    assert_eq!(path(&import, "n3"), "island/island/island");
    let notes: Vec<_> = import.notes.iter().map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "line 6: switch \"empty\" has no hosts below and is left out",
            "line 2: switches \"leaf2\" and 1 more are next to a level that others have; each \
             counts as one of its own there",
            "line 4: switches \"core\" and 1 more have no switch above them; a plan may still \
             span them, unless the job sets `scope` and `requires_scope`",
        ]
    );
    import.inventory(&["1".parse().unwrap()]).unwrap();
}

#[test]
fn sizes_are_bounded() {
    let deep = (1..40).map(|n| format!("SwitchName=s{n} Switches=s{}\n", n - 1));
    let deep = format!("SwitchName=s0 Nodes=n1\n{}", deep.collect::<String>());
    assert_eq!(why(&deep), "the tree has 40 levels, and racksum reads at most 16");
    let many = (0..3).map(|n| format!("SwitchName=s{n} Nodes=x{n}-[1-30000]\n"));
    let why = why(&many.collect::<String>());
    assert_eq!(
        why,
        "line 3: more than 65536 names are listed, the last of them by \"x2-[1-30000]\""
    );
    // The names of switches and blocks count too, even without hosts.
    let empty = "SwitchName=s\n".repeat(70_000);
    assert!(conf(&empty).unwrap_err().to_string().starts_with("line 65537: more than 65536 names"));
    // A large chain of switches ends in an error without a deep stack.
    let chain = (1..20_000).map(|n| format!("SwitchName=s{n} Switches=s{}\n", n - 1));
    let cycle = format!("SwitchName=s0 Switches=s19999\n{}", chain.collect::<String>());
    assert!(conf(&cycle).unwrap_err().to_string().starts_with("line 1: the switches s0 > s19999"));
}

#[test]
fn counts_and_gpus_of_an_allocation() {
    assert_eq!(per_host("72(x2),36", 3), Ok(vec![72, 72, 36]));
    assert_eq!(per_host("8", 1), Ok(vec![8]));
    assert_eq!(per_host("8(x2)", 3), Err(AllocationError::Hosts { listed: 2, hosts: 3 }));
    let huge = format!("8(x{0}),8(x{0})", usize::MAX);
    assert_eq!(per_host(&huge, 3), Err(AllocationError::Hosts { listed: usize::MAX, hosts: 3 }));
    for text in ["", "x", "8(x", "8(x2", "8(y2)", "-1", "8,,8"] {
        assert!(matches!(per_host(text, 1), Err(AllocationError::Counts(_))), "{text}");
    }
    assert_eq!(gpus("4"), Ok([("gpu".into(), 4)].into()));
    assert_eq!(gpus("h100:4,a100:2"), Ok([("a100".into(), 2), ("h100".into(), 4)].into()));
    for text in ["", "h100", ":4", "h100:x", "h100:1,h100:2"] {
        assert!(matches!(gpus(text), Err(AllocationError::Gpus(_))), "{text}");
    }
}

proptest! {
    /// Random text of the words that matter never panics, and an import is always an inventory or
    /// has a reason.
    #[test]
    fn random_files_never_panic(
        words in proptest::collection::vec(prop::sample::select(WORDS), 0..60),
    ) {
        let text = words.concat();
        for format in [Format::Conf, Format::Yaml] {
            if let Ok(import) = read(&text, format, None) {
                drop(import.inventory(&["1".parse().unwrap()]));
            }
        }
    }

    #[test]
    fn every_prefix_of_a_file_is_read_or_refused(end in 0..YAML.len()) {
        drop(read(&YAML[..end], Format::Yaml, None));
        drop(conf(&TREE[..end.min(TREE.len())]));
    }

    /// A random tree gives each host the path of its switches, in whatever order the file is.
    #[test]
    fn random_trees_are_imported(
        parents in proptest::collection::vec(any::<prop::sample::Index>(), 1..12),
        seed in any::<u64>(),
    ) {
        let parents: Vec<_> =
            parents.iter().enumerate().map(|(index, parent)| parent.index(index + 1)).collect();
        // Switch 0 is the root, and switch i + 1 is below switch parents[i]. Leaves have a host.
        let line = |switch: usize| {
            let below = parents.iter().zip(1_usize..).filter(|(parent, _)| **parent == switch);
            let below: Vec<_> = below.map(|(_, child)| format!("s{child}")).collect();
            if below.is_empty() {
                format!("SwitchName=s{switch} Nodes=n{switch}\n")
            } else {
                format!("SwitchName=s{switch} Switches={}\n", below.join(","))
            }
        };
        let mut lines: Vec<_> = (0..=parents.len()).map(line).collect();
        let by = usize::try_from(seed % 97).unwrap() % lines.len();
        lines.rotate_left(by);
        let import = conf(&lines.concat()).unwrap();
        for host in &import.hosts {
            let mut labels: Vec<_> =
                import.levels.iter().map(|level| host.labels[level].clone()).collect();
            labels.dedup();
            let mut at: usize = host.name[1..].parse().unwrap();
            let mut path = vec![format!("s{at}")];
            while at > 0 {
                at = parents[at - 1];
                path.push(format!("s{at}"));
            }
            path.reverse();
            prop_assert_eq!(labels, path);
        }
    }
}

/// The words of random files.
const WORDS: &[&str] = &[
    "SwitchName=",
    "Switches=",
    "Nodes=",
    "BlockName=",
    "BlockSizes=",
    "a",
    "b",
    "c",
    "n[1-3]",
    "[",
    "]",
    "1",
    "-",
    ",",
    " ",
    "\n",
    "\\\n",
    "#",
    "\"",
    "=",
    "4,8",
    "- ",
    "  ",
    "topology: ",
    "tree:",
    "switches:",
    "switch: ",
    "children: ",
    "nodes: ",
    "block:",
    "blocks:",
    "flat: true",
    "&x",
    "*x",
    "{",
    "}",
    "é",
    "\t",
    ":",
];
