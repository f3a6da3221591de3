//! The setters of options.
#![forbid(unsafe_code)]

/// Defines the setters of a struct of options: a method for each field, of its name, that takes the options and returns
/// them changed. A field that is an `Option` is set to `Some`.
///
/// ```
/// #[derive(Default)]
/// pub struct Options {
///     pub name: String,
///     pub threads: Option<usize>,
/// }
///
/// hoistway_io::setters! {
///     Options {
///         name: String,
///         threads: Option<usize>,
///     }
/// }
///
/// let options = Options::default().name("reader").threads(2);
/// assert_eq!((options.name.as_str(), options.threads), ("reader", Some(2)));
/// ```
#[macro_export]
macro_rules! setters {
    ($options:ident { $($fields:tt)* }) => {
        impl $options {
            $crate::setters!(@each $($fields)*);
        }
    };
    (@each) => {};
    (@each $(#[$attribute:meta])* $field:ident: Option<$kind:ty>, $($fields:tt)*) => {
        $crate::setters!(@one [$(#[$attribute])*] $field, $kind, Some($field));
        $crate::setters!(@each $($fields)*);
    };
    (@each $(#[$attribute:meta])* $field:ident: String, $($fields:tt)*) => {
        $crate::setters!(@one [$(#[$attribute])*] $field, impl Into<String>, $field.into());
        $crate::setters!(@each $($fields)*);
    };
    (@each $(#[$attribute:meta])* $field:ident: $kind:ty, $($fields:tt)*) => {
        $crate::setters!(@one [$(#[$attribute])*] $field, $kind, $field);
        $crate::setters!(@each $($fields)*);
    };
    (@one [$($attributes:tt)*] $field:ident, $kind:ty, $value:expr) => {
        $($attributes)*
        #[doc = concat!("Sets [`", stringify!($field), "`](Self#structfield.", stringify!($field), ").")]
        #[must_use]
        pub fn $field(mut self, $field: $kind) -> Self {
            self.$field = $value;
            self
        }
    };
}
