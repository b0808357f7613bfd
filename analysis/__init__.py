"""What a study means: measures, laws, figures, report."""
