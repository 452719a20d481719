"""What a user is shown beside the table: pages, pictures, the code before and after, the comparison of two reports."""
