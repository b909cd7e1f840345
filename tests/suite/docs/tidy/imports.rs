//! No two modules import each other, directly or through others.
//!
//! Each file in `src` is a module. A path in its code that leads to another file's module is an import of it, in a
//! `use` or in an expression. The check resolves paths that begin with `crate`, `self`, `super` or the name of a child
//! module, as deep as there are files. Code for tests only does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use syn::visit::{self, Visit};

use super::assert_none;
use super::sources::{Source, is_test_only, modules};

/// Imports of one module, each with the names that it takes.
pub(super) type Imports = BTreeMap<String, BTreeSet<String>>;

/// Collects the paths of a file that lead to other modules.
struct PathCollector<'m> {
    modules: &'m BTreeMap<String, Source>,
    module: Vec<String>,
    imports: Imports,
}

impl PathCollector<'_> {
    /// Adds the module that a path leads to, if it is another one.
    fn add(&mut self, path: &[String]) {
        let Some(first) = path.first() else { return };
        let absolute: Vec<String> = match first.as_str() {
            "crate" => path[1..].to_vec(),
            "self" => self.module.iter().chain(&path[1..]).cloned().collect(),
            "super" => {
                let supers = path.iter().take_while(|segment| *segment == "super").count();
                let Some(kept) = self.module.len().checked_sub(supers) else { return };
                self.module[..kept].iter().chain(&path[supers..]).cloned().collect()
            }
            _ => self.module.iter().chain(path).cloned().collect(),
        };
        let deepest =
            (1..=absolute.len()).rev().find(|&depth| self.modules.contains_key(&absolute[..depth].join("::")));
        let Some(depth) = deepest else { return };
        let target = absolute[..depth].join("::");
        // A module itself, named as a whole, is only a shorter path to its items.
        let name = absolute.get(depth).cloned().unwrap_or_default();
        if target != self.module.join("::") && !target.is_empty() {
            self.imports.entry(target).or_default().insert(name);
        }
    }

    fn add_tree(&mut self, prefix: &[String], tree: &syn::UseTree) {
        let with = |name: &syn::Ident| prefix.iter().cloned().chain([name.to_string()]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(path) => self.add_tree(&with(&path.ident), &path.tree),
            syn::UseTree::Name(name) if name.ident == "self" => self.add(prefix),
            syn::UseTree::Name(name) => self.add(&with(&name.ident)),
            syn::UseTree::Rename(rename) => self.add(&with(&rename.ident)),
            syn::UseTree::Glob(_) => self.add(prefix),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(prefix, tree)),
        }
    }
}

impl<'ast> Visit<'ast> for PathCollector<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test_only(&item.attrs) {
            self.add_tree(&[], &item.tree);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 && path.leading_colon.is_none() {
            self.add(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        }
        visit::visit_path(self, path);
    }
}

fn imports(modules: &BTreeMap<String, Source>) -> BTreeMap<String, Imports> {
    let of = |(path, source): (&String, &Source)| {
        let module = if path.is_empty() { Vec::new() } else { path.split("::").map(str::to_owned).collect() };
        let mut collector = PathCollector { modules, module, imports: Imports::new() };
        collector.visit_file(&source.syntax);
        (path.clone(), collector.imports)
    };
    modules.iter().map(of).collect()
}

/// The modules that can be reached from `start` over one import or more.
fn reachable<'i>(graph: &'i BTreeMap<String, Imports>, start: &str) -> BTreeSet<&'i str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = vec![start];
    while let Some(module) = open.pop() {
        for target in graph.get(module).into_iter().flat_map(Imports::keys) {
            if reached.insert(target.as_str()) {
                open.push(target);
            }
        }
    }
    reached
}

/// The groups of modules that import each other in a circle, each with the imports inside it.
fn cycles(graph: &BTreeMap<String, Imports>) -> Vec<String> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|module| (module.as_str(), reachable(graph, module))).collect();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut found = Vec::new();
    for (module, reached) in &reach {
        if seen.contains(module) || !reached.contains(module) {
            continue;
        }
        let group: Vec<&str> = reached.iter().copied().filter(|other| reach[other].contains(module)).collect();
        seen.extend(&group);
        let mut text = format!("cycle of {} modules:", group.len());
        for from in &group {
            for (to, names) in graph[*from].iter().filter(|(to, _)| group.contains(&to.as_str())) {
                let names = names.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
                text += &format!("\n  {from} -> {to}: {names}");
            }
        }
        found.push(text);
    }
    found
}

/// The imports of each module in `src`, without those of `lib.rs`. Parsing takes a while, so all tests share them.
pub(super) static IMPORTS: LazyLock<BTreeMap<String, Imports>> = LazyLock::new(|| {
    let mut graph = imports(&modules());
    graph.remove("");
    graph
});

#[test]
fn modules_do_not_import_each_other_in_a_circle() {
    assert!(IMPORTS.len() > 100, "only {} modules were found", IMPORTS.len());
    assert_none("import cycles", &cycles(&IMPORTS));
}

#[test]
fn a_cycle_through_a_third_module_is_found() {
    let names = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), BTreeSet::new())).collect::<Imports>();
    let graph = [("a", names(&["b"])), ("b", names(&["c", "d"])), ("c", names(&["a"])), ("d", names(&[]))];
    let graph = graph.into_iter().map(|(name, imports)| (name.to_owned(), imports)).collect();
    let found = cycles(&graph);
    assert_eq!(found, ["cycle of 3 modules:\n  a -> b: \n  b -> c: \n  c -> a: "]);
}
