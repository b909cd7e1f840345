//! Lists of elements that contain such lists: trees of any depth, dropped without recursion.
//!
//! Rules over xDS may nest as deep as a chain of a thousand conditions, which the destructors that the compiler makes
//! would follow on the stack. `Clone` and `Debug` do recurse; nothing uses them for rules that were not made by a tool.

use std::mem;
use std::ops::{Deref, DerefMut};
use std::slice;

/// An element with elements of the same type below it.
pub trait HasChildren: Sized {
    /// Elements below.
    fn children_mut(&mut self) -> &mut ChildList<Self>;
}

/// Elements of one level, with all that is below them.
#[derive(Clone, Debug)]
pub struct ChildList<T: HasChildren>(Vec<T>);

impl<T: HasChildren> ChildList<T> {
    /// An empty list.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Elements of this level.
    pub fn into_vec(mut self) -> Vec<T> {
        mem::take(&mut self.0)
    }
}

impl<T: HasChildren> Default for ChildList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: HasChildren> From<Vec<T>> for ChildList<T> {
    fn from(elements: Vec<T>) -> Self {
        Self(elements)
    }
}

impl<T: HasChildren> Deref for ChildList<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T: HasChildren> DerefMut for ChildList<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<'l, T: HasChildren> IntoIterator for &'l ChildList<T> {
    type Item = &'l T;
    type IntoIter = slice::Iter<'l, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<T: HasChildren> Drop for ChildList<T> {
    fn drop(&mut self) {
        let mut waiting = mem::take(&mut self.0);
        while let Some(mut element) = waiting.pop() {
            waiting.append(&mut element.children_mut().0);
        }
    }
}
