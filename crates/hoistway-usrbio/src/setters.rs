//! The setters of options.
#![forbid(unsafe_code)]

/// Defines a method for each field of a struct of options: it has the field's name, takes the options and returns them
/// changed. A field that is an `Option` is set to `Some`.
macro_rules! setters {
    (@value $field:ident) => { $field };
    (@value $field:ident $wrap:path) => { $wrap($field) };
    ($options:ident { $($field:ident: $kind:ty $(=> $wrap:path)?,)+ }) => {
        impl $options {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self#structfield.", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $kind) -> Self {
                    self.$field = setters!(@value $field $($wrap)?);
                    self
                }
            )+
        }
    };
}

pub(crate) use setters;
